"""
The states of a composite's ranks: the base's own, or what they become at another world size.

A note says what does not carry over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from layerstore.compose.choose import Composition, check_members, check_whole
from layerstore.compose.safetensors import WEIGHTS_FILE
from layerstore.errors import InvalidInput, LayoutMismatch
from layerstore.format import WITHOUT_MOMENTS
from layerstore.layers import strip_wrappers
from layerstore.model import CommitRecord, LayerVersion, RankState, TensorSource
from layerstore.storage import Repository
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

# Only the first rank's file has these.
_OF_THE_FIRST = frozenset({"shared_params"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """A composite for some number of ranks, before a byte is moved. States are made one at a time, to save memory."""

    repo: Repository
    base: CommitRecord
    world_size: int
    versions: list[LayerVersion]
    """Of the composite's layers, in their order."""
    slices: Slices
    regrouping: Regrouping | None
    """None where the base has as many ranks: then its trees do not change."""
    steps: Mapping[str, tuple[str, int | None]] | None
    """Each parameter's layer and that layer's own optimizer step, where these are to be set."""
    notes: tuple[str, ...]
    """What does not carry over, in plain sentences."""

    def __iter__(self) -> Iterator[RankState]:
        """Yield the state of every rank, by rank."""
        return map(self.state, range(self.world_size))

    def state(self, rank: int) -> RankState:
        """Return the state of *rank*."""
        if self.regrouping is None:
            state = self.repo.state(self.base.states[rank])
        else:
            state = self._regrouped(self.regrouping, rank)
        return state if self.steps is None else with_own_steps(state, self.steps)

    def _regrouped(self, regrouping: Regrouping, rank: int) -> RankState:
        # Ranks that the base had keep their own state; new ones are made from the first rank's, which every base has.
        # Files for all ranks, gathered weights among them, stay with the first.
        has_own = rank < self.base.world_size
        template = self.repo.state(self.base.states[rank if has_own else 0])
        files = tuple(file for file in template.files if not RANDOM_STATE.fullmatch(file.path)) if has_own else ()
        state = regrouped(template, regrouping, rank=rank)
        return replace(state, files=files, gathered=template.gathered if has_own else ())


def plan_ranks(
    repo: Repository, composition: Composition, *, world_size: int | None = None, adam_step: AdamStep = "unify"
) -> RankStates:
    """
    Decide what *composition* is for *world_size* ranks; by default for as many as its base has.

    Raises:
        InvalidInput: *world_size* or *adam_step* has no such value.
        LayoutMismatch: The layers do not fit together, the base has no moments, its sub-groups cannot be made anew,
            or the layers of one have different counters.
    """
    base = composition.base
    if WITHOUT_MOMENTS in base.flags:
        called = f"{base.run}@{base.step}"
        raise LayoutMismatch(
            f"{called} has no optimizer moments any more: a collection has dropped them",
            hint=f"its weights are there: layerstore compose {called} --format hf -o DIR; or choose a newer step",
        )
    check_whole(repo, composition, world_size=world_size)
    versions = check_members(repo, composition)
    slices = Slices(versions)
    count = base.world_size if world_size is None else world_size
    if count < 1:
        raise InvalidInput(f"a checkpoint cannot be of {count} ranks", hint="choose a world size of 1 or more")
    if adam_step not in ADAM_STEPS:
        raise InvalidInput(f"{adam_step!r} is no adam_step", hint=f"choose one of: {', '.join(ADAM_STEPS)}")
    first = repo.state(base.states[0])
    notes = [*_buffer_notes(slices, count), *(_gathered_notes(first, slices) if composition.older_layers else ())]
    regrouping = None
    if count != base.world_size:
        regrouping = plan_regrouping(first, world_size=count)
        notes += _notes_of_states(repo, base, first, world_size=count)
    steps = None
    if adam_step == "per-layer":
        layers = zip(composition.layers, versions, strict=True)
        steps = {of.name: (entry.layer, entry.optimizer_step) for entry, version in layers for of in version.parameters}
    states = RankStates(
        repo=repo,
        base=base,
        world_size=count,
        versions=versions,
        slices=slices,
        regrouping=regrouping,
        steps=steps,
        notes=tuple(notes),
    )
    if steps is not None:
        states.state(0)  # raises, before anything is written, where the layers of a sub-group do not agree
    return states


# -- what does not carry over --------------------------------------------------------------------------------------


def _buffer_notes(slices: Slices, world_size: int) -> Iterator[str]:
    odd = {name: shards for name, shards in slices.rank_buffers().items() if shards != world_size}
    if odd:
        name, shards = next(iter(odd.items()))
        others = f" and {len(odd) - 1} others" if len(odd) > 1 else ""
        yield f"buffer {name!r}{others} differed between the {shards} ranks that saved it: {_fate(shards, world_size)}"


def _fate(before: int, after: int) -> str:
    """Say what becomes of values that differ between *before* ranks."""
    if before < after:
        return f"ranks from {before} on take those of rank 0"
    return f"those of ranks from {after} on are left out"


def _gathered_notes(first: RankState, slices: Slices) -> Iterator[str]:
    """Name gathered weights that do not follow from the layers: in a mixture they are still the base's."""
    known = {name for of in slices.parameters.values() for name in (of.name, *of.aliases)} | slices.buffers()
    bare = {strip_wrappers(name) for name in known}
    for file in first.gathered:
        stored = [tensor.name for tensor in file.tensors if tensor.source is TensorSource.STORED]
        strange = [name for name in stored if strip_wrappers(name) not in bare]
        if strange:
            yield (
                f"{file.path} has tensors under names that no layer has ({len(strange)}, first: {strange[0]!r}), "
                "as the base saved them: a resume does not read them; for from_pretrained use compose --format hf"
            )
    for kept in first.files:
        if WEIGHTS_FILE.fullmatch(kept.path):
            yield (
                f"{kept.path} is as the base saved it, since no layer has its names: a resume does not read it; "
                "for from_pretrained use compose --format hf, not this folder"
            )


def _notes_of_states(repo: Repository, base: CommitRecord, first: RankState, *, world_size: int) -> Iterator[str]:
    random_states = 0
    odd: dict[str, None] = {}
    expected = _own_values(first)
    for number, ref in enumerate(base.states):
        state = repo.state(ref) if number else first
        random_states += sum(RANDOM_STATE.fullmatch(file.path) is not None for file in state.files)
        found = _own_values(state)
        odd |= dict.fromkeys(key for key in {**expected, **found} if expected.get(key) != found.get(key))
    if random_states:
        # Keeping only some ranks' states would give neither the old random numbers nor new ones. The Trainer expects
        # other file names for one rank than for several. Trainer and Accelerate both resume without the files.
        yield (
            f"the random states of {_ranks(random_states)} are left out: at another world size they mean nothing, "
            "so dropout and shuffling start from the seed"
        )
    if odd:
        names = ", ".join(map(repr, odd))
        yield f"the ranks saved different values of {names}: {_fate(base.world_size, world_size)}"
    if config_of(TreeView.of(first.model)) is None:
        yield "DeepSpeed's config is not in the checkpoint: sub-groups were made for its default sub_group_size"
    yield (
        "the learning rate schedule and global_samples continue where they were; a Trainer that skips what it has seen "
        "skips as many batches, of the new size"
    )
    yield (
        f"the global batch is micro batch x accumulation x ranks: with {_ranks(world_size)} instead of "
        f"{base.world_size} it is {world_size / base.world_size:.3g} times what it was unless you change the others"
    )


def _own_values(state: RankState) -> dict[str, bytes]:
    """Return what the rank's trees hold besides slices, by key, as bytes that can be compared."""
    outer = TreeView.of(state.optimizer)["optimizer_state_dict"]
    values: dict[Tree, Tree] = {**outer.mapping(), **TreeView.of(state.model).mapping()}
    return {str(key): same_bytes(value) for key, value in values.items() if key not in _OF_THE_FIRST}


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
