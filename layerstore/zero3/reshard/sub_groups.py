"""
The sub-groups of stage 3: how DeepSpeed cuts param groups into flat buffers, and a rank's trees for new sub-groups.

No tree is changed in place, so one rank's tree can serve as the template for many.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath

from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.filenames import SHARD_STEM
from layerstore.slices import slice_length
from layerstore.states import FlatContent, RankState, TreeFile
from layerstore.tree import OrderedMap, Size, Tensor, Tree, changed, replace_tensors, with_content
from layerstore.zero3.trees import (
    TreeView,
    config_of,
    inner_optimizer,
    members_of,
    outer_optimizer,
    same_bytes,
    sub_group_shapes,
    with_optimizer,
)

# DeepSpeed's default.
_SUB_GROUP_SIZE = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """A new sub-group: one flat buffer on every rank."""

    param_group: int
    sample: int
    """A sub-group of the base, in the same param group; everything but slices is taken from this sub-group."""
    shapes: dict[str, Size]
    elements: int
    """The length of the buffer."""


# -- which parameters go together ----------------------------------------------------------------------------------


def plan_sub_groups(state: RankState, *, world_size: int, is_by_rule: bool = True) -> tuple[SubGroup, ...]:
    """
    Decide the sub-groups for *world_size* ranks, from the state of any of the base's ranks.

    Without *is_by_rule*, the sub-groups of *state* are not checked against DeepSpeed's rule, because each is
    a whole param group.

    Raises:
        LayoutMismatch: The base's own sub-groups do not follow from its config, or disagree with each other.
    """
    model = TreeView.of(state.model)
    shapes, members = sub_group_shapes(model), members_of(state)
    size = sub_group_size(model)
    if is_by_rule:
        _check_rule(shapes, members, size, saved_by=model["dp_world_size"].integer())
    _check_scalars(state, members)
    planned = []
    for param_group, old in members:
        together = [(name, shape) for group in old for name, shape in shapes[group].items()]
        lengths = [slice_length(prod(shape), world_size) for _, shape in together]
        for chosen in sub_groups(lengths, size=size):
            own, elements = dict(together[chosen.start : chosen.stop]), sum(lengths[chosen.start : chosen.stop])
            planned.append(SubGroup(param_group=param_group, sample=old[0], shapes=own, elements=elements))
    return tuple(planned)


def sub_groups(lengths: Sequence[int], *, size: float) -> Iterator[range]:
    """
    Yield the index range of the parameters in each flat buffer of a param group, from the *lengths* of their slices.

    As in DeepSpeed, a sub-group is closed once it holds at least *size* elements per rank; no parameter is split.

    >>> list(sub_groups([8, 6, 4], size=10)), list(sub_groups([5, 4, 3], size=10))
    ([range(0, 2), range(2, 3)], [range(0, 3)])
    """
    is_split = sum(lengths) > size
    first = held = 0
    for index, length in enumerate(lengths):
        held += length
        if is_split and held >= size:
            yield range(first, index + 1)
            first, held = index + 1, 0
    if first < len(lengths):
        yield range(first, len(lengths))


def sub_group_size(model: TreeView) -> float:
    """Return how many elements per rank a sub-group must hold before the next begins."""
    zero = (config_of(model) or {}).get("zero_optimization")
    size = zero.get("sub_group_size", _SUB_GROUP_SIZE) if isinstance(zero, dict) else _SUB_GROUP_SIZE
    # JSON may hold 1e9, a float.
    return size if isinstance(size, int | float) and not isinstance(size, bool) else _SUB_GROUP_SIZE


def _check_rule(
    shapes: Sequence[Mapping[str, Size]], members: Sequence[tuple[int, list[int]]], size: float, *, saved_by: int
) -> None:
    """Raise unless DeepSpeed's rule explains how the base was split."""
    for param_group, old in members:
        lengths = [slice_length(prod(shape), saved_by) for group in old for shape in shapes[group].values()]
        expected = [len(chosen) for chosen in sub_groups(lengths, size=size)]
        if expected != [len(shapes[group]) for group in old]:
            raise LayoutMismatch(
                f"param group {param_group} was saved in {len(old)} sub-groups, but sub_group_size {size:.0f} makes "
                f"{len(expected)} of it: how the engine would split it for other ranks is unknown",
                hint=f"compose at the base's world size, {saved_by}",
            )


def _check_scalars(state: RankState, members: Sequence[tuple[int, list[int]]]) -> None:
    """Raise unless the sub-groups of a param group agree in everything but slices, step counters included."""
    states = inner_optimizer(state)["state"]
    for param_group, (first, *others) in members:
        expected = _scalars(states.get(first))
        for group in others:
            scalars = _scalars(states.get(group))
            odd = next((key for key in {**expected, **scalars} if expected.get(key) != scalars.get(key)), None)
            if odd is not None:
                raise LayoutMismatch(
                    f"sub-groups {first} and {group} of param group {param_group} differ in {odd!r}: "
                    "their parameters cannot be regrouped",
                    hint="compose at the world size of the base, or from another base",
                )


def _scalars(state: TreeView | None) -> dict[Tree, object]:
    return {} if state is None else {key: _image(value) for key, value in state.mapping().items()}


def _image(value: Tree) -> object:
    if isinstance(value, Tensor) and isinstance(value.storage.content, FlatContent):
        return "slices", value.storage.dtype
    return same_bytes(value)


# -- one rank's trees ----------------------------------------------------------------------------------------------


def regrouped(template: RankState, groups: Sequence[SubGroup], *, rank: int, world_size: int) -> RankState:
    """Return the state of *rank*, made from *template*; only the two trees are changed."""
    return replace(
        template,
        rank=rank,
        model=_model(template, groups, rank, world_size),
        optimizer=_optimizer(template, groups, rank, world_size),
    )


def _model(template: RankState, groups: Sequence[SubGroup], rank: int, world_size: int) -> TreeFile:
    view = TreeView.of(template.model)
    fragments, shapes = view.get("frozen_param_fragments"), view.get("frozen_param_shapes")
    values: dict[Tree, Tree] = {
        "dp_world_size": world_size,
        "param_shapes": [OrderedMap(group.shapes) for group in groups],
    }
    if fragments is not None and fragments.value is not None and shapes is not None:  # None: left out of the save
        values["frozen_param_fragments"] = changed(fragments.mapping(), dict(_fragments(fragments, shapes, world_size)))
    if rank != template.rank:
        # Only the first rank records which parameters share memory.
        values["shared_params"] = {}
    tree = changed(view.mapping(), values)
    return TreeFile(path=path_of_rank(template.model.path, rank), tree=tree)


def _fragments(fragments: TreeView, shapes: TreeView, world_size: int) -> Iterator[tuple[Tree, Tree]]:
    for name, fragment in fragments.children():
        shape = shapes[str(name)].value
        assert isinstance(shape, Size), "shapes were checked when the commit was made"
        yield name, resized(fragment.tensor(), slice_length(prod(shape), world_size))


def _optimizer(template: RankState, groups: Sequence[SubGroup], rank: int, world_size: int) -> TreeFile:
    outer, inner = outer_optimizer(template), inner_optimizer(template)
    masters, states = outer["fp32_flat_groups"], inner["state"]
    flats: list[Tree] = [
        _flat(masters[own.sample].tensor(), FlatContent(state="", group=index), own.elements)
        for index, own in enumerate(groups)
    ]
    state: dict[Tree, Tree] = {
        index: _state(states[own.sample], index, own.elements)
        for index, own in enumerate(groups)
        if states.get(own.sample) is not None  # none before the first update
    }
    param_groups: list[Tree] = [
        changed(group.mapping(), {"params": [index for index, own in enumerate(groups) if own.param_group == number]})
        for number, (_, group) in enumerate(inner["param_groups"].children())
    ]
    tree = with_optimizer(
        template,
        outer={"partition_count": world_size, "fp32_flat_groups": flats},
        inner={"state": state, "param_groups": param_groups},
    )
    return TreeFile(path=path_of_rank(template.optimizer.path, rank), tree=tree)


def _state(sample: TreeView, group: int, elements: int) -> dict[Tree, Tree]:
    """Return a sub-group's optimizer state: slices of the new length, copies of everything else."""
    state: dict[Tree, Tree] = {}
    for key, value in sample.children():
        if isinstance(value.value, Tensor) and isinstance(value.value.storage.content, FlatContent):
            content = replace(value.value.storage.content, group=group)
            state[key] = _flat(value.value, content, elements)
        else:
            # Copies, so that two sub-groups never share one counter's memory.
            state[key] = replace_tensors(value.value, lambda tensor: replace(tensor, storage=replace(tensor.storage)))
    return state


def _flat(sample: Tensor, content: FlatContent, elements: int) -> Tensor:
    # Drop ds_id, DeepSpeed's mark with the numbers of a buffer's first and last parameter: no loader reads it.
    attributes = {key: value for key, value in (sample.attributes or {}).items() if key != "ds_id"}
    return replace(resized(sample, elements, content), attributes=attributes or None)


def resized(sample: Tensor, elements: int, content: object = None) -> Tensor:
    """Return a tensor like *sample* with *elements* elements in a storage of its own."""
    resized = replace(sample, shape=Size((elements,)), stride=(1,))
    return with_content(resized, sample.storage.content if content is None else content)


def path_of_rank(path: str, rank: int) -> str:
    """
    Return the path of *rank*'s file that corresponds to the file at *path*.

    >>> path_of_rank("global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 11)
    'global_step4/bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt'
    """
    place = PurePosixPath(path)
    if not SHARD_STEM.fullmatch(place.stem):
        raise IntegrityError(f"a commit's state names the file {path!r}, which is not a rank's")
    return str(place.with_name(re.sub(r"(?<=zero_pp_rank_)\d+", str(rank), place.name)))
