"""
The states of a composite's ranks: the base's own, or adapted to another world size.

Sub-groups follow DeepSpeed's own rule. No tree is changed in place, so one rank's tree can serve as the template for
many. Notes say what does not carry over.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import Literal

from layerstore.compose.carry_over import buffer_notes, gathered_notes, moments_notes, notes_of_states, same_bytes
from layerstore.compose.choose import Composition, check_members, check_whole
from layerstore.errors import IntegrityError, InvalidInput, LayoutMismatch
from layerstore.format import WITHOUT_MOMENTS
from layerstore.model import CommitRecord, FlatContent, LayerVersion, RankState, TreeFile
from layerstore.storage import Repository
from layerstore.tree import OrderedMap, Size, Tensor, Tree, changed, replace_tensors, with_content
from layerstore.zero3 import (
    RANDOM_STATE,
    SHARD_STEM,
    STEP,
    Slices,
    TreeView,
    config_of,
    counter_like,
    inner_optimizer,
    members_of,
    outer_optimizer,
    slice_length,
    sub_group_shapes,
    with_optimizer,
)

Moments = Literal["base", "fresh"]
MOMENTS: tuple[Moments, ...] = ("base", "fresh")
AdamStep = Literal["unify", "per-layer"]
ADAM_STEPS: tuple[AdamStep, ...] = ("unify", "per-layer")

_UNIFY = "compose with --adam-step unify, or train with a param group per layer"

# What the optimizers of torch and DeepSpeed keep for each parameter, and begin with zeros.
_ZERO_AT_FIRST = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
    }
)

# DeepSpeed's default.
_SUB_GROUP_SIZE = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """A new sub-group: one flat buffer on every rank."""

    param_group: int
    sample: int
    """A sub-group of the base in the same param group: everything but slices is taken from it."""
    shapes: dict[str, Size]
    elements: int
    """The length of the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """A composite for some number of ranks, before a byte is moved. States are made one at a time, to save memory."""

    repo: Repository
    base: CommitRecord
    world_size: int
    versions: list[LayerVersion]
    """The versions of the composite's layers, in their order."""
    slices: Slices
    sub_groups: tuple[SubGroup, ...] | None
    """None if the base has the same number of ranks, so that its trees do not change."""
    steps: Mapping[str, tuple[str, int | None]] | None
    """Each parameter's layer and that layer's own optimizer step; None if these are not to be set."""
    notes: tuple[str, ...]
    """What does not carry over, in plain sentences."""
    has_moments: bool
    """Whether the optimizer continues; otherwise its moments are zero."""

    def __iter__(self) -> Iterator[RankState]:
        """Yield the state of every rank, by rank."""
        return map(self.state, range(self.world_size))

    def state(self, rank: int) -> RankState:
        """Return the state of *rank*."""
        # Ranks that the base had keep their own state; new ones are made from rank 0's, which every base has. Files for
        # all ranks, including gathered weights, stay with rank 0.
        has_own = rank < self.base.world_size
        state = self.repo.state(self.base.states[rank if has_own else 0])
        if self.sub_groups is not None:
            files = tuple(file for file in state.files if has_own and not RANDOM_STATE.fullmatch(file.path))
            state = regrouped(state, self.sub_groups, rank=rank, world_size=self.world_size)
            state = replace(state, files=files, gathered=state.gathered if has_own else ())
        return state if self.steps is None else with_own_steps(state, self.steps)


def plan_ranks(
    repo: Repository,
    composition: Composition,
    *,
    world_size: int | None = None,
    adam_step: AdamStep = "unify",
    moments: Moments = "base",
) -> RankStates:
    """
    Plan *composition* for *world_size* ranks, by default for as many as its base has.

    Raises:
        InvalidInput: *world_size* or *adam_step* has an invalid value.
        LayoutMismatch: The layers do not fit together, the base has no moments, its sub-groups cannot be rebuilt, or
            the layers of one have different counters.
    """
    base = composition.base
    if moments not in MOMENTS:
        raise InvalidInput(f"moments cannot be {moments!r}", hint=f"choose one of: {', '.join(MOMENTS)}")
    if moments == "base":
        check_has_moments(base)
    check_whole(repo, composition, world_size=world_size)
    versions = check_members(repo, composition)
    slices = composition.slices(repo, versions)
    count = base.world_size if world_size is None else world_size
    if count < 1:
        raise InvalidInput(f"a checkpoint cannot have {count} ranks", hint="choose a world size of 1 or more")
    check_adam_step(adam_step)
    first = repo.state(base.states[0])
    if moments == "fresh":
        _check_fresh(first)
    notes = [*filter(None, [composition.mixture]), *buffer_notes(slices, count)]
    notes += moments_notes(composition, is_fresh=moments == "fresh")
    notes += gathered_notes(first, slices) if composition.older_layers or composition.mean else ()
    groups = None
    if count != base.world_size:
        groups = plan_sub_groups(first, world_size=count)
        notes += notes_of_states(repo, base, first, world_size=count)
    steps: dict[str, tuple[str, int | None]] | None = None
    if moments == "fresh" and adam_step == "per-layer":
        raise InvalidInput(
            "fresh moments have no steps of their own", hint="leave --adam-step out: the optimizer counts from 0"
        )
    if moments == "fresh" or adam_step == "per-layer":
        layers = zip(composition.layers, versions, strict=True)
        steps = {
            of.name: (entry.layer, 0 if moments == "fresh" else entry.optimizer_step)
            for entry, version in layers
            for of in version.parameters
        }
    states = RankStates(
        repo=repo,
        base=base,
        world_size=count,
        versions=versions,
        slices=slices,
        sub_groups=groups,
        steps=steps,
        notes=tuple(notes),
        has_moments=moments == "base",
    )
    if steps is not None:
        states.state(0)  # raises before anything is written if the layers of a sub-group disagree
    return states


def check_has_moments(base: CommitRecord) -> None:
    """Raise LayoutMismatch if a collection has dropped the moments of *base*."""
    if WITHOUT_MOMENTS in base.flags:
        called = f"{base.run}@{base.step}"
        raise LayoutMismatch(
            f"{called} has no optimizer moments any more: a collection has dropped them",
            hint=f"its weights are there: layerstore compose {called} --format hf -o DIR, or --moments fresh; or "
            "choose a newer step",
        )


def check_adam_step(adam_step: AdamStep) -> None:
    """Raise InvalidInput unless it is one."""
    if adam_step not in ADAM_STEPS:
        raise InvalidInput(f"{adam_step!r} is no adam_step", hint=f"choose one of: {', '.join(ADAM_STEPS)}")


def _check_fresh(state: RankState) -> None:
    """Raise unless all that the optimizer keeps is zero before the first step."""
    for _, kept in inner_optimizer(state)["state"].children():
        for key, value in kept.mapping().items():
            is_sliced = isinstance(value, Tensor) and isinstance(value.storage.content, FlatContent)
            if key != STEP and not (is_sliced and key in _ZERO_AT_FIRST):
                raise LayoutMismatch(
                    f"the optimizer keeps {key!r}, which does not begin at zero, or not for each parameter",
                    hint="--moments base continues it",
                )


# -- which parameters go together ----------------------------------------------------------------------------------


def plan_sub_groups(state: RankState, *, world_size: int) -> tuple[SubGroup, ...]:
    """
    Decide the sub-groups for *world_size* ranks, from the state of any of the base's ranks.

    Raises:
        LayoutMismatch: The base's own sub-groups do not follow from its config, or disagree with each other.
    """
    model = TreeView.of(state.model)
    shapes, members = sub_group_shapes(model), members_of(state)
    size = _sub_group_size(model)
    _check_rule(shapes, members, size, saved_by=model["dp_world_size"].integer())
    _check_scalars(state, members)
    found = []
    for param_group, old in members:
        together = [(name, shape) for group in old for name, shape in shapes[group].items()]
        lengths = [slice_length(prod(shape), world_size) for _, shape in together]
        for chosen in sub_groups(lengths, size=size):
            own, elements = dict(together[chosen.start : chosen.stop]), sum(lengths[chosen.start : chosen.stop])
            found.append(SubGroup(param_group=param_group, sample=old[0], shapes=own, elements=elements))
    return tuple(found)


def sub_groups(lengths: Sequence[int], *, size: float) -> Iterator[range]:
    """
    Yield which parameters of a param group DeepSpeed puts into one flat buffer, by the *lengths* of their slices.

    A sub-group is closed once it holds at least *size* elements per rank; parameters are never split for it.

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


def _sub_group_size(model: TreeView) -> float:
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
                hint=f"compose at world size {saved_by}, that of the base",
            )


def _check_scalars(state: RankState, members: Sequence[tuple[int, list[int]]]) -> None:
    """Raise unless the sub-groups of a param group agree in everything but slices, step counters included."""
    states = inner_optimizer(state)["state"]
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


# -- one rank's trees ----------------------------------------------------------------------------------------------


def regrouped(template: RankState, groups: Sequence[SubGroup], *, rank: int, world_size: int) -> RankState:
    """Return the state of *rank*, made from *template*; files other than the trees stay the same."""
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
    if fragments is not None and fragments.value is not None and shapes is not None:  # None: they were left out
        values["frozen_param_fragments"] = changed(fragments.mapping(), dict(_fragments(fragments, shapes, world_size)))
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
    return TreeFile(path=_path_of_rank(template.optimizer.path, rank), tree=tree)


def _state(sample: TreeView, group: int, elements: int) -> dict[Tree, Tree]:
    """Return a sub-group's optimizer state: slices of the new length, copies of everything else."""
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
    """Return a tensor like *sample* with *elements* in its own storage."""
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


# -- each layer's own step counter -----------------------------------------------------------------------------------


def with_own_steps(state: RankState, steps: Mapping[str, tuple[str, int | None]]) -> RankState:
    """
    Return *state* with each sub-group's counter set to that of its layers.

    *steps* gives each parameter's layer and the layer's update count.

    Raises:
        LayoutMismatch: The layers of a sub-group have different update counts.
    """
    groups, states = sub_group_shapes(TreeView.of(state.model)), inner_optimizer(state)["state"]
    counted: dict[Tree, Tree] = {
        group: changed(values.mapping(), {STEP: counter_like(values.mapping()[STEP], _agreed(groups, group, steps))})
        for group, values in states.children()
        if isinstance(group, int) and STEP in values.mapping()
    }
    tree = with_optimizer(state, outer={}, inner={"state": changed(states.mapping(), counted)})
    return replace(state, optimizer=replace(state.optimizer, tree=tree))


def _agreed(groups: Sequence[Mapping[str, object]], group: int, steps: Mapping[str, tuple[str, int | None]]) -> int:
    """Return the update count that all layers of a sub-group share."""
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
