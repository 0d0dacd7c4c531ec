"""
The ranks of a composite: the base's own states, or what becomes of them at another world size.

What cannot go along is said in notes; nothing is left out in silence.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Literal

from layerstore.errors import InvalidInput
from layerstore.export.hf import WEIGHTS_FILE
from layerstore.gc.trim import check_has_moments
from layerstore.layers import strip_wrappers
from layerstore.model import CommitRecord, LayerEntry, LayerVersion, RankState, TensorSource, TreeFile
from layerstore.ops.composition import Composition, check_members, check_whole
from layerstore.storage.rooms import Rooms
from layerstore.tree import Tree
from layerstore.zero3 import (
    RANDOM_STATE,
    Regrouping,
    Slices,
    TreeView,
    config_of,
    plan_regrouping,
    regrouped,
    same_bytes,
    with_own_steps,
)

AdamStep = Literal["unify", "per-layer"]
ADAM_STEPS: tuple[AdamStep, ...] = ("unify", "per-layer")

# Of these the first rank's file alone tells.
_OF_THE_FIRST = frozenset({"shared_params"})

_BATCH_KEYS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The states of all ranks of a composite, made one at a time: their number does not cost memory."""

    rooms: Rooms
    base: CommitRecord
    world_size: int
    regrouping: Regrouping | None
    """None where the base was saved by as many ranks: then nothing in its trees changes."""
    steps: Mapping[str, tuple[str, int | None]] | None
    """Each parameter's layer and that layer's own optimizer step, where these are to be set."""
    notes: tuple[str, ...]
    """What does not carry over, in plain sentences."""

    def states(self) -> Iterator[RankState]:
        """Yield the state of every rank, by rank."""
        yield from map(self.state, range(self.world_size))

    def state(self, rank: int) -> RankState:
        """Return the state of *rank*."""
        state = self._state(rank)
        return state if self.steps is None else with_own_steps(state, self.steps)

    def _state(self, rank: int) -> RankState:
        if self.regrouping is None:
            return self.rooms.state(self.base.states[rank])
        # A rank that the base had goes on from its own state. The others begin as the first one, the only rank that
        # every base has; what only that one may have, gathered weights and files for all, is left to it.
        has_own = rank < self.base.world_size
        template = self.rooms.state(self.base.states[rank if has_own else 0])
        files = tuple(file for file in template.files if not RANDOM_STATE.fullmatch(file.path)) if has_own else ()
        state = regrouped(template, self.regrouping, rank=rank)
        return replace(state, files=files, gathered=template.gathered if has_own else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A composite before a byte of it is moved."""

    versions: list[LayerVersion]
    """Of its layers, in their order."""
    slices: Slices
    ranks: Ranks


def plan_composite(rooms: Rooms, composition: Composition, *, world_size: int | None, adam_step: AdamStep) -> Planned:
    """
    Decide what *composition* is for *world_size* ranks; without it, for as many as its base has.

    Raises:
        LayoutMismatch: Its layers do not fit together, its base has no moments, or it cannot be had that way.
    """
    check_has_moments(composition.base, called=f"{composition.base.run}@{composition.base.step}")
    check_whole(rooms, composition, world_size=world_size)
    versions = check_members(rooms, composition)
    slices = Slices(versions)
    layers = list(zip(composition.layers, versions, strict=True))
    ranks = _plan_ranks(rooms, composition.base, layers, slices, world_size=world_size, adam_step=adam_step)
    return Planned(versions=versions, slices=slices, ranks=ranks)


def _plan_ranks(
    rooms: Rooms,
    base: CommitRecord,
    layers: Sequence[tuple[LayerEntry, LayerVersion]],
    slices: Slices,
    *,
    world_size: int | None,
    adam_step: AdamStep,
) -> Ranks:
    """
    Decide what the trees of *world_size* ranks are; without it, as many as the base has.

    Raises:
        LayoutMismatch: The base's sub-groups cannot be made anew, or no counter fits all layers of one.
    """
    count = base.world_size if world_size is None else world_size
    if count < 1:
        raise InvalidInput(f"a checkpoint cannot be of {count} ranks", hint="choose a world size of 1 or more")
    if adam_step not in ADAM_STEPS:
        raise InvalidInput(f"{adam_step!r} is no adam_step", hint=f"choose one of: {', '.join(ADAM_STEPS)}")
    first = rooms.state(base.states[0])
    is_mixed = any(not entry.saved_by(base) for entry, _ in layers)
    notes = [*_buffer_notes(slices, count), *(_gathered_notes(first, slices) if is_mixed else ())]
    regrouping = None
    if count != base.world_size:
        regrouping = plan_regrouping(first, world_size=count)
        notes += _notes_of_states(rooms, base, first, world_size=count)
    ranks = Ranks(
        rooms=rooms,
        base=base,
        world_size=count,
        regrouping=regrouping,
        steps=_own_steps(layers) if adam_step == "per-layer" else None,
        notes=tuple(notes),
    )
    if ranks.steps is not None:
        # Whether the layers of each sub-group agree is the same for all ranks: known before anything is written.
        next(ranks.states())
    return ranks


def _own_steps(layers: Iterable[tuple[LayerEntry, LayerVersion]]) -> dict[str, tuple[str, int | None]]:
    return {
        parameter.name: (entry.layer, entry.optimizer_step)
        for entry, version in layers
        for parameter in version.parameters
    }


# -- what does not carry over --------------------------------------------------------------------------------------


def _buffer_notes(slices: Slices, world_size: int) -> Iterator[str]:
    odd = {name: shards for name, shards in slices.rank_buffers().items() if shards != world_size}
    if odd:
        name, shards = next(iter(odd.items()))
        others = f" and {len(odd) - 1} others" if len(odd) > 1 else ""
        fate = (
            f"ranks from {shards} on take that of rank 0"
            if shards < world_size
            else f"those of ranks from {world_size} on are left out"
        )
        yield f"buffer {name!r}{others} differed between the {shards} ranks that saved it: {fate}"


def _gathered_notes(first: RankState, slices: Slices) -> Iterator[str]:
    """Say which whole weights do not follow the layers: in a mixture they are the base's alone."""
    known = {name for of in slices.parameters.values() for name in (of.name, *of.aliases)} | slices.buffers()
    bare = {strip_wrappers(name) for name in known}
    for file in first.gathered:
        stored = [tensor.name for tensor in file.tensors if tensor.source is TensorSource.STORED]
        strange = [name for name in stored if strip_wrappers(name) not in bare]
        if strange:
            yield (
                f"{file.path} has {len(strange)} tensors under names that no layer has ({strange[0]!r} …), as the base "
                "saved them: a resume does not read them; for from_pretrained use compose --format hf, not this folder"
            )
    for kept in first.files:
        if WEIGHTS_FILE.fullmatch(kept.path):
            yield (
                f"{kept.path} is as the base saved it, since no layer has its names: a resume does not read it; "
                "for from_pretrained use compose --format hf, not this folder"
            )


def _notes_of_states(rooms: Rooms, base: CommitRecord, first: RankState, *, world_size: int) -> Iterator[str]:
    random_states = 0
    odd: dict[str, None] = {}
    expected = _own_values(first)
    for number, ref in enumerate(base.states):
        state = rooms.state(ref) if number else first
        random_states += sum(RANDOM_STATE.fullmatch(file.path) is not None for file in state.files)
        found = _own_values(state)
        odd |= dict.fromkeys(key for key in {**expected, **found} if expected.get(key) != found.get(key))
    if random_states:
        # Some ranks' states and not others' would be neither the old course of random numbers nor a new one; the
        # Trainer looks for other names at one rank than at several; and both libraries go on without the files.
        yield (
            f"the random states of {_ranks(random_states)} are left out: at another world size they mean nothing, "
            "so dropout and shuffling go on from the seed"
        )
    if odd:
        fate = (
            f"ranks from {base.world_size} on take those of rank 0"
            if base.world_size < world_size
            else f"those of ranks from {world_size} on are left out"
        )
        yield f"the ranks saved different values of {', '.join(map(repr, odd))}: {fate}"
    yield from _batch_notes(first, base.world_size, world_size)


def _own_values(state: RankState) -> dict[str, bytes]:
    """Return what the rank's trees hold besides slices, by key, in a form that can be compared."""
    outer = _view(state.optimizer)["optimizer_state_dict"]
    values: dict[Tree, Tree] = {**outer.mapping(), **_view(state.model).mapping()}
    return {str(key): same_bytes(value) for key, value in values.items() if key not in _OF_THE_FIRST}


def _batch_notes(first: RankState, before: int, after: int) -> Iterator[str]:
    config = config_of(_view(first.model))
    if config is None:
        yield (
            "DeepSpeed's config is not in the checkpoint: sub-groups were made for its default sub_group_size, "
            f"and the global batch changes unless its parts make up for {_ranks(after)} instead of {before}"
        )
        return
    micro, accumulation = _batch(config, before)
    yield (
        "the learning rate schedule and global_samples go on where they were; a Trainer that skips what it has seen "
        "skips as many batches, of the new size"
    )
    if micro is None or config.get("sequence_parallel_size") not in {None, 1}:  # ranks that share their samples
        yield f"the global batch changes with the number of ranks, from {before} to {after}"
        return
    yield (
        f"micro batch {micro} x accumulation {accumulation} x {_ranks(before)} was a global batch of "
        f"{micro * accumulation * before}; with {_ranks(after)} it is {micro * accumulation * after} unless you change "
        "them"
    )


def _batch(config: Mapping[Tree, Tree], world_size: int) -> tuple[int | None, int]:
    """
    Return micro batch and accumulation as DeepSpeed completes them.

    What the checkpoint holds of its config stays as it was: no loader reads it, an engine has its own.
    """
    micro, accumulation, whole = (
        value if isinstance(value, int) and value > 0 else None for value in map(config.get, _BATCH_KEYS)
    )
    if whole is not None and micro is None:
        micro = whole // (world_size * (accumulation or 1)) or None
    if whole is not None and micro is not None and accumulation is None:
        accumulation = whole // (world_size * micro) or None
    return micro, accumulation or 1


def _view(file: TreeFile) -> TreeView:
    return TreeView(file.tree, path=PurePosixPath(file.path))


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
