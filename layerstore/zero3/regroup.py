"""
The trees of a composite's ranks: for another world size, and with each layer's own step counter.

Sub-groups follow DeepSpeed's own rule. No tree is changed in place, so one rank's can serve as the template of many.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath

from layerstore.errors import IntegrityError, LayoutMismatch
from layerstore.format import encode_tree, pack
from layerstore.model import FlatContent, RankState, TreeFile
from layerstore.tree import OrderedMap, Size, Tensor, Tree
from layerstore.zero3.filenames import SHARD_STEM
from layerstore.zero3.rank_files import COUNTERS, STEP
from layerstore.zero3.slices import slice_length, sub_groups
from layerstore.zero3.trees import TreeView, changed, config_of, replace_tensors, sub_group_shapes, with_content

# DeepSpeed's default.
_SUB_GROUP_SIZE = 10**9

_UNIFY = "compose with --adam-step unify, or train with a param group per layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """A new sub-group: one flat buffer on every rank."""

    param_group: int
    sample: int
    """A sub-group of the base in the same param group: everything but slices is taken from it."""
    shapes: dict[str, Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """The sub-groups of *world_size* ranks."""

    world_size: int
    sub_groups: tuple[SubGroup, ...]

    def lengths(self) -> list[int]:
        """Return the length of every flat buffer."""
        return [_length(group.shapes, self.world_size) for group in self.sub_groups]


# -- which parameters go together ----------------------------------------------------------------------------------


def plan_regrouping(state: RankState, *, world_size: int) -> Regrouping:
    """
    Decide the sub-groups for *world_size* ranks, from the state of any of the base's ranks.

    Raises:
        LayoutMismatch: The base's own sub-groups do not follow from its config, or do not agree with each other.
    """
    model = TreeView.of(state.model)
    shapes, members = sub_group_shapes(model), _members(state)
    size = _sub_group_size(model)
    _check_rule(shapes, members, size, saved_by=model["dp_world_size"].integer())
    _check_scalars(state, members)
    found = []
    for param_group, old in members:
        together = [(name, shape) for group in old for name, shape in shapes[group].items()]
        lengths = [_length({name: shape}, world_size) for name, shape in together]
        for chosen in sub_groups(lengths, size=size):
            own = dict(together[chosen.start : chosen.stop])
            found.append(SubGroup(param_group=param_group, sample=old[0], shapes=own))
    return Regrouping(world_size=world_size, sub_groups=tuple(found))


def _sub_group_size(model: TreeView) -> float:
    zero = (config_of(model) or {}).get("zero_optimization")
    size = zero.get("sub_group_size", _SUB_GROUP_SIZE) if isinstance(zero, dict) else _SUB_GROUP_SIZE
    # JSON may hold 1e9, a float.
    return size if isinstance(size, int | float) and not isinstance(size, bool) else _SUB_GROUP_SIZE


def _members(state: RankState) -> list[tuple[int, list[int]]]:
    """Return the param groups that have sub-groups, and these, in the order of the buffers."""
    view = _inner(state)["param_groups"]
    found = [
        (number, [index for index in group["params"].sequence() if isinstance(index, int)])
        for number, (_, group) in enumerate(view.children())
    ]
    flats = len(_outer(state)["fp32_flat_groups"].sequence())
    if sorted(index for _, own in found for index in own) != list(range(flats)):
        raise LayoutMismatch(
            f"{view.path}: the param groups do not share the {flats} sub-groups among them",
            hint="compose at the world size of the base, or from another base",
        )
    return sorted(((number, own) for number, own in found if own), key=lambda item: item[1])


def _check_rule(
    shapes: Sequence[Mapping[str, Size]], members: Sequence[tuple[int, list[int]]], size: float, *, saved_by: int
) -> None:
    """Raise unless DeepSpeed's rule explains how the base was split."""
    for param_group, old in members:
        names = [list(shapes[group]) for group in old]
        lengths = [_length({name: shape}, saved_by) for group in old for name, shape in shapes[group].items()]
        expected = [len(chosen) for chosen in sub_groups(lengths, size=size)]
        if expected != [len(group) for group in names]:
            raise LayoutMismatch(
                f"param group {param_group} was saved in {len(names)} sub-groups, but sub_group_size {size:.0f} makes "
                f"{len(expected)} of it: how the engine would split it for other ranks is unknown",
                hint=f"compose at world size {saved_by}, that of the base",
            )


def _check_scalars(state: RankState, members: Sequence[tuple[int, list[int]]]) -> None:
    """Raise unless the sub-groups of a param group agree in everything but slices, step counters included."""
    states = _inner(state)["state"]
    for param_group, (first, *others) in members:
        expected = _scalars(states.get(first))
        for group in others:
            found = _scalars(states.get(group))
            odd = next((key for key in {**expected, **found} if expected.get(key) != found.get(key)), None)
            if odd is not None:
                raise LayoutMismatch(
                    f"sub-groups {first} and {group} of param group {param_group} differ in {odd!r}: "
                    "their parameters cannot be put together in others",
                    hint="compose at the world size of the base, or from another base",
                )


def _scalars(state: TreeView | None) -> dict[Tree, object]:
    return {} if state is None else {key: _image(value) for key, value in state.mapping().items()}


def _image(value: Tree) -> object:
    if isinstance(value, Tensor) and isinstance(value.storage.content, FlatContent):
        return "slices", value.storage.dtype
    return same_bytes(value)


def same_bytes(tree: Tree) -> bytes:
    """Return bytes that are equal for equal trees, including small tensors, whatever their device."""

    def anywhere(tensor: Tensor) -> Tensor:
        return replace(tensor, storage=replace(tensor.storage, device=""))

    return pack(encode_tree(replace_tensors(tree, anywhere), content_to_plain=repr))


# -- one rank's trees ----------------------------------------------------------------------------------------------


def regrouped(template: RankState, regrouping: Regrouping, *, rank: int) -> RankState:
    """Return the state of *rank*, made from that of *template*; files beside the trees stay the same."""
    return replace(
        template,
        rank=rank,
        model=_model(template, regrouping, rank),
        optimizer=_optimizer(template, regrouping, rank),
    )


def _model(template: RankState, regrouping: Regrouping, rank: int) -> TreeFile:
    view = TreeView.of(template.model)
    fragments, shapes = view.get("frozen_param_fragments"), view.get("frozen_param_shapes")
    values: dict[Tree, Tree] = {
        "dp_world_size": regrouping.world_size,
        "param_shapes": [OrderedMap(group.shapes) for group in regrouping.sub_groups],
    }
    if fragments is not None and fragments.value is not None and shapes is not None:  # None: they were left out
        values["frozen_param_fragments"] = changed(
            fragments.mapping(), dict(_fragments(fragments, shapes, regrouping.world_size))
        )
    if rank != template.rank:
        # Only the first rank records which parameters share memory.
        values["shared_params"] = {}
    tree = changed(view.mapping(), values)
    return TreeFile(path=_path_of_rank(template.model.path, rank), tree=tree)


def _fragments(fragments: TreeView, shapes: TreeView, world_size: int) -> Iterator[tuple[Tree, Tree]]:
    for name, fragment in fragments.children():
        shape = shapes[str(name)].value
        assert isinstance(shape, Size), "shapes were checked when the commit was made"
        yield name, _resized(fragment.tensor(), slice_length(prod(shape), world_size))


def _optimizer(template: RankState, regrouping: Regrouping, rank: int) -> TreeFile:
    outer, inner = _outer(template), _inner(template)
    groups, lengths = list(enumerate(regrouping.sub_groups)), regrouping.lengths()
    masters, states = outer["fp32_flat_groups"], inner["state"]
    flats: list[Tree] = [
        _flat(masters[own.sample].tensor(), FlatContent(state="", group=index), lengths[index]) for index, own in groups
    ]
    state: dict[Tree, Tree] = {
        index: _state(states[own.sample], index, lengths[index])
        for index, own in groups
        if states.get(own.sample) is not None  # none before the first update
    }
    param_groups: list[Tree] = [
        changed(group.mapping(), {"params": [index for index, own in groups if own.param_group == number]})
        for number, (_, group) in enumerate(inner["param_groups"].children())
    ]
    tree = _with_optimizer(
        template,
        outer={"partition_count": regrouping.world_size, "fp32_flat_groups": flats},
        inner={"state": state, "param_groups": param_groups},
    )
    return TreeFile(path=_path_of_rank(template.optimizer.path, rank), tree=tree)


def _with_optimizer(state: RankState, *, outer: Mapping[Tree, Tree], inner: Mapping[Tree, Tree]) -> Tree:
    """Return the tree of the ``optim_states`` with other values in DeepSpeed's and in the optimizer's own state."""
    within = changed(_inner(state).mapping(), inner)
    around = changed(_outer(state).mapping(), {**outer, "optimizer_state_dict": within})
    return changed(TreeView.of(state.optimizer).mapping(), {"optimizer_state_dict": around})


def _state(sample: TreeView, group: int, elements: int) -> dict[Tree, Tree]:
    """Return a sub-group's optimizer state: slices of the new length, copies of all else."""
    found: dict[Tree, Tree] = {}
    for key, value in sample.children():
        if isinstance(value.value, Tensor) and isinstance(value.value.storage.content, FlatContent):
            content = replace(value.value.storage.content, group=group)
            found[key] = _flat(value.value, content, elements)
        else:
            # Copies, so that two sub-groups never share one counter's memory.
            found[key] = replace_tensors(value.value, lambda tensor: replace(tensor, storage=replace(tensor.storage)))
    return found


def _flat(sample: Tensor, content: FlatContent, elements: int) -> Tensor:
    # DeepSpeed marks a buffer with the numbers of its first and last parameter. No loader reads the mark.
    attributes = {key: value for key, value in (sample.attributes or {}).items() if key != "ds_id"}
    return replace(_resized(sample, elements, content), attributes=attributes or None)


def _resized(sample: Tensor, elements: int, content: object = None) -> Tensor:
    """Return a tensor like *sample* with *elements* in a storage of its own."""
    resized = replace(sample, shape=Size((elements,)), stride=(1,))
    return with_content(resized, sample.storage.content if content is None else content)


def _path_of_rank(path: str, rank: int) -> str:
    """
    Return the name that the file at *path* has for *rank*.

    >>> _path_of_rank("global_step4/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 11)
    'global_step4/bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt'
    """
    place = PurePosixPath(path)
    if not SHARD_STEM.fullmatch(place.stem):
        raise IntegrityError(f"a commit's state names the file {path!r}, which is no rank's")
    return str(place.with_name(re.sub(r"(?<=zero_pp_rank_)\d+", str(rank), place.name)))


def _length(shapes: Mapping[str, Size], world_size: int) -> int:
    return sum(slice_length(prod(shape), world_size) for shape in shapes.values())


def _outer(state: RankState) -> TreeView:
    return TreeView.of(state.optimizer)["optimizer_state_dict"]


def _inner(state: RankState) -> TreeView:
    return _outer(state)["optimizer_state_dict"]


# -- each layer's own step counter -----------------------------------------------------------------------------------


def with_own_steps(state: RankState, steps: Mapping[str, tuple[str, int | None]]) -> RankState:
    """
    Return *state* with each sub-group's counter set to that of its layers.

    *steps* names each parameter's layer and how often the optimizer had updated that.

    Raises:
        LayoutMismatch: The layers of a sub-group were updated more or less often than each other.
    """
    groups, states = sub_group_shapes(TreeView.of(state.model)), _inner(state)["state"]
    counted: dict[Tree, Tree] = {
        group: changed(values.mapping(), {STEP: _counter(values.mapping()[STEP], _agreed(groups, group, steps))})
        for group, values in states.children()
        if isinstance(group, int) and STEP in values.mapping()
    }
    tree = _with_optimizer(state, outer={}, inner={"state": changed(states.mapping(), counted)})
    return replace(state, optimizer=replace(state.optimizer, tree=tree))


def _agreed(groups: Sequence[Mapping[str, object]], group: int, steps: Mapping[str, tuple[str, int | None]]) -> int:
    """Return the count that all layers of a sub-group share."""
    missing = [name for name in groups[group] if name not in steps]
    if missing:
        raise LayoutMismatch(f"parameter {missing[0]!r} is in none of the chosen layers", name=missing[0])
    found = list(dict.fromkeys(steps[name] for name in groups[group]))
    first, count = found[0]
    if count is None:
        raise LayoutMismatch(f"layer {first!r} has no optimizer step of its own to be set", hint=_UNIFY)
    for layer, other in found:
        if other != count:
            raise LayoutMismatch(
                f"layers {first!r} (optimizer step {count}) and {layer!r} (optimizer step {other}) share sub-group "
                f"{group}, which has one counter: each layer's own step cannot be kept",
                hint=_UNIFY,
            )
    return count


def _counter(old: Tree, count: int) -> Tree:
    """Return a counter like *old* that says *count*."""
    if isinstance(old, Tensor) and old.elements == 1 and old.storage.dtype in COUNTERS:
        return with_content(old, COUNTERS[old.storage.dtype].pack(count))
    if isinstance(old, int) and not isinstance(old, bool):
        return count
    raise LayoutMismatch(
        f"the base's optimizer counts its steps in a {type(old).__name__}, which cannot be set",
        hint="compose with --adam-step unify",
    )
