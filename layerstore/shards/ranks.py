"""
The states of a composite's ranks: the base's own, or adapted to another world size.

Sub-groups follow DeepSpeed's own rule. No tree is changed in place, so one rank's tree can serve as the template for
many. Notes list what does not carry over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from layerstore.compose import Composition, cautions, check_splittable, load_versions
from layerstore.errors import IntegrityError, InvalidInput, LayoutMismatch
from layerstore.filenames import RANDOM_STATE, WEIGHTS_FILE
from layerstore.format import WITHOUT_MOMENTS
from layerstore.history import METRICS, references_to
from layerstore.layers import strip_wrappers
from layerstore.model import CommitRecord, LayerVersion
from layerstore.rank_options import AdamStep, RankOptions
from layerstore.shards.successor import Successor, successor
from layerstore.slices import Slices
from layerstore.states import FlatContent, RankState, TensorSource
from layerstore.storage import Repository
from layerstore.tree import Tensor, Tree, changed
from layerstore.zero3.reshard import (
    OptimizerState,
    as_stage_3,
    conversion_note,
    optimizer_of,
    plan_sub_groups,
    regrouped,
    repartitioned,
)
from layerstore.zero3.trees import (
    STAGE_3,
    STEP,
    TreeView,
    config_of,
    counter_like,
    inner_optimizer,
    outer_optimizer,
    same_bytes,
    stage_of,
    sub_group_shapes,
    undivided,
    with_optimizer,
)

_UNIFY = "compose with --adam-step unify, or train with a param group per layer"

# What the optimizers of torch and DeepSpeed keep for each parameter, starting from zeros.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """A composite for some number of ranks, before a byte is moved. States are made one at a time, to save memory."""

    repo: Repository
    base: CommitRecord
    world_size: int
    stage: int
    """The ZeRO stage."""
    versions: list[LayerVersion]
    """The versions of the composite's layers, in their order."""
    slices: Slices
    successor: Successor | None
    """Makes a rank's state from its state in an earlier commit; None unless FSDP2 saved the base."""
    adapted: Callable[[RankState, int], RankState] | None
    """Makes the state of a rank from a state of the base; None if the base's trees do not change."""
    steps: Mapping[str, tuple[str, int | None]] | None
    """Each parameter's layer and that layer's own optimizer step; None if counters stay as they are."""
    notes: tuple[str, ...]
    """What does not carry over, in plain sentences."""
    has_moments: bool
    """Whether the optimizer keeps its moments; otherwise they are zero."""

    @property
    def tag(self) -> str:
        """The name of DeepSpeed's folder."""
        return self.state(0).model.path.partition("/")[0]

    def __iter__(self) -> Iterator[RankState]:
        return map(self.state, range(self.world_size))

    def state(self, rank: int) -> RankState:
        """Return the state of *rank*."""
        # Ranks that the base had keep their own state; states of new ranks are made from rank 0's, which every base
        # has. Files for all ranks, including gathered weights, stay with rank 0.
        has_own = rank < self.base.world_size
        state = self.repo.state(self.base.states[rank if has_own else 0])
        if self.successor is not None:
            state = self.successor.state(state)
        if self.adapted is not None:
            files = state.files if has_own else ()
            if self.world_size != self.base.world_size:
                files = tuple(file for file in files if not RANDOM_STATE.fullmatch(file.path))
            state = replace(self.adapted(state, rank), files=files, gathered=state.gathered if has_own else ())
        return state if self.steps is None else with_own_steps(state, self.steps)


def plan_ranks(
    repo: Repository,
    composition: Composition,
    options: RankOptions,
    *,
    is_live: bool = False,
) -> RankStates:
    """
    Plan *composition* for the ranks that *options* ask for; with *is_live*, notes suggest arguments of ``resume``.

    Raises:
        LayoutMismatch: The layers do not fit together, the base has no moments, its sub-groups cannot be rebuilt, or
            the layers of a sub-group have different counters.
    """
    base, is_fresh = composition.base, options.moments == "fresh"
    if not is_fresh:
        check_has_moments(base)
    following = successor(repo, base, options.like) if base.is_dcp else None
    if following is not None:
        # From here on, everything but the layers comes from the earlier DeepSpeed commit.
        base = following.before
    elif options.like is not None:
        [called] = references_to(repo, [base])
        raise InvalidInput(f"{called} was saved by DeepSpeed, and has a state of its own", hint="leave --like out")
    count = base.world_size if options.world_size is None else options.world_size
    is_converted = options.as_zero3 and base.stage != STAGE_3
    check_splittable(repo, composition, world_size=options.world_size, is_converted=is_converted)
    versions = load_versions(repo, composition)
    slices = composition.slices(repo, versions)
    first = _first_state(repo, base)
    if following is not None:
        first = following.state(first)
    if is_fresh:
        _check_fresh(first)
    notes = [*cautions(repo, composition, moments=not is_fresh, is_live=is_live), *buffer_notes(slices, count)]
    notes += following.notes if following is not None else ()
    notes += moments_notes(composition, is_fresh=is_fresh)
    notes += gathered_notes(first, slices) if composition.older_layers or composition.mean else ()
    adapted = _adapter(base, first, world_size=count, is_converted=is_converted)
    if count != base.world_size:
        notes += notes_of_states(repo, base, first, world_size=count)
    if is_converted:
        notes.append(conversion_note(first))
    steps: dict[str, tuple[str, int | None]] | None = None
    if is_fresh or options.adam_step == "per-layer":
        layers = zip(composition.layers, versions, strict=True)
        steps = {
            parameter.name: (entry.layer, 0 if is_fresh else entry.optimizer_step)
            for entry, version in layers
            for parameter in version.parameters
        }
    states = RankStates(
        repo=repo,
        base=base,
        world_size=count,
        stage=STAGE_3 if options.as_zero3 else base.stage,
        versions=versions,
        slices=slices,
        successor=following,
        adapted=adapted,
        steps=steps,
        notes=tuple(notes),
        has_moments=not is_fresh,
    )
    if steps is not None or adapted is not None:
        states.state(0)  # raises before anything is written if the layers of a sub-group disagree
    return states


def _first_state(repo: Repository, base: CommitRecord) -> RankState:
    """Return the state of rank 0; raises IntegrityError if its stage is not the record's."""
    state = repo.state(base.states[0])
    if (base.stage == STAGE_3) != (stage_of(outer_optimizer(state)) == STAGE_3):
        raise IntegrityError(
            f"the record of {base.run}@{base.step} says ZeRO stage {base.stage}, but its rank states have another",
            hint="use another save",
        )
    return state


def _adapter(
    base: CommitRecord, first: RankState, *, world_size: int, is_converted: bool
) -> Callable[[RankState, int], RankState] | None:
    """Return `RankStates.adapted`; raises LayoutMismatch if the base's sub-groups cannot be rebuilt."""
    if is_converted:
        whole_groups = plan_sub_groups(as_stage_3(first), world_size=world_size, is_by_rule=False)
        return lambda state, rank: regrouped(as_stage_3(state), whole_groups, rank=rank, world_size=world_size)
    if world_size == base.world_size:
        return None
    if base.stage != STAGE_3:
        return lambda state, rank: repartitioned(state, rank=rank, world_size=world_size)
    groups = plan_sub_groups(first, world_size=world_size)
    return lambda state, rank: regrouped(state, groups, rank=rank, world_size=world_size)


def plan_optimizer(
    repo: Repository, composition: Composition, versions: Sequence[LayerVersion], *, adam_step: AdamStep
) -> OptimizerState:
    """
    Return the optimizer of *composition*, parameter by parameter; *versions* are the versions of its layers.

    Raises:
        LayoutMismatch: The base has no moments, or moments that cannot be split by parameter.
    """
    base = composition.base
    check_has_moments(base)
    state = _first_state(repo, base)
    kept = undivided(state)
    if kept:
        [called] = references_to(repo, [base])
        raise LayoutMismatch(
            f"the optimizer of {called} keeps {kept}, which cannot be split by parameter",
            hint="use --format shards at the base's own world size",
        )
    if base.stage != STAGE_3:
        state = as_stage_3(state)  # parameters in the order in which the optimizer was given them
    layers = zip(composition.layers, versions, strict=True) if adam_step == "per-layer" else ()
    entries = {parameter.name: entry for entry, version in layers for parameter in version.parameters}
    optimizer = optimizer_of(state, versions, entries=entries)
    if composition.mean is None:
        return optimizer
    notes = [*optimizer.notes]
    notes.append(f"the optimizer's moments are those of {base.run}@{base.step}, not averaged")
    return replace(optimizer, notes=tuple(notes))


def check_has_moments(base: CommitRecord) -> None:
    """Raise LayoutMismatch if gc has removed the moments of *base*."""
    if WITHOUT_MOMENTS in base.flags:
        raise LayoutMismatch(
            f"{base.run}@{base.step} no longer has optimizer moments: gc has removed them",
            hint="its weights remain: export them (--format hf), start anew (--moments fresh), or use a newer step",
        )


def _check_fresh(state: RankState) -> None:
    """Raise unless all that the optimizer keeps is zero before the first step."""
    for _, kept in inner_optimizer(state)["state"].children():
        for key, value in kept.mapping().items():
            is_sliced = isinstance(value, Tensor) and isinstance(value.storage.content, FlatContent)
            if key != STEP and not (is_sliced and key in _ZERO_AT_FIRST):
                raise LayoutMismatch(
                    f"the optimizer keeps {key!r}, which does not begin at zero, or not for each parameter",
                    hint="use --moments base, which keeps it",
                )


# -- each layer's own step counter -----------------------------------------------------------------------------------


def with_own_steps(state: RankState, steps: Mapping[str, tuple[str, int | None]]) -> RankState:
    """
    Return *state* with each sub-group's counter set to the update count of its layers.

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
    counts = list(dict.fromkeys(steps[name] for name in groups[group]))
    first, count = counts[0]
    if count is None:
        raise LayoutMismatch(f"layer {first!r} has no optimizer step of its own to be set", hint=_UNIFY)
    for layer, other in counts:
        if other != count:
            raise LayoutMismatch(
                f"layers {first!r} (optimizer step {count}) and {layer!r} (optimizer step {other}) share sub-group "
                f"{group}, which has one counter: each layer's own step cannot be kept",
                hint=_UNIFY,
            )
    return count


# -- what does not carry over, in plain sentences ------------------------------------------------------------------

# Keys whose values may differ by rank: some are only in the first rank's file, and that rank's metrics become the
# commit's.
_OF_THE_RANK = frozenset(
    {"shared_params", "single_partition_of_fp32_groups", "group_paddings", "param_slice_mappings", METRICS}
)


def moments_notes(composition: Composition, *, is_fresh: bool) -> Iterator[str]:
    """Yield a note on the moments that the optimizer begins with, if they do not belong to the weights."""
    if is_fresh:
        yield (
            "the optimizer's moments are zero and its counters 0, as before the first step, but the learning rate "
            "schedule continues: begin it anew, with a warm-up"
        )
    elif composition.mean is not None:
        base = composition.base
        yield f"the optimizer's moments are those of {base.run}@{base.step}, not averaged; --moments fresh zeroes them"


def buffer_notes(slices: Slices, world_size: int) -> Iterator[str]:
    """Yield a note on the buffers that differed between ranks, if the number of ranks changes."""
    odd = {name: shards for name, shards in slices.rank_buffers().items() if shards != world_size}
    if odd:
        name, shards = next(iter(odd.items()))
        others = f" and {len(odd) - 1} others" if len(odd) > 1 else ""
        yield f"buffer {name!r}{others} differed between the {shards} ranks that saved it: {_fate(shards, world_size)}"


def _fate(before: int, after: int) -> str:
    """Describe what happens to values that differ between *before* ranks."""
    if before < after:
        return f"ranks {before} and up get the values of rank 0"
    return f"the values of ranks {after} and up are left out"


def gathered_notes(first: RankState, slices: Slices) -> Iterator[str]:
    """Yield notes on gathered weights that no layer supplies: in a mixture, these weights are still the base's."""
    known = {
        name for parameter in slices.parameters.values() for name in (parameter.name, *parameter.aliases)
    } | slices.buffers()
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


def notes_of_states(repo: Repository, base: CommitRecord, first: RankState, *, world_size: int) -> Iterator[str]:
    """Yield notes on what changes with the number of ranks."""
    random_states = 0
    odd: dict[str, None] = {}
    expected = _own_values(first)
    for number, ref in enumerate(base.states):
        state = repo.state(ref) if number else first
        random_states += sum(RANDOM_STATE.fullmatch(file.path) is not None for file in state.files)
        own = _own_values(state)
        odd |= dict.fromkeys(key for key in {**expected, **own} if expected.get(key) != own.get(key))
    if random_states:
        # Keeping only some ranks' states would give neither the old random numbers nor new ones. The Trainer expects
        # different file names for one rank and for several. Trainer and Accelerate both resume without the files.
        yield (
            f"the random states of {_ranks(random_states)} are left out: at another world size they mean nothing, "
            "so dropout and shuffling start from the seed"
        )
    if odd:
        names = ", ".join(map(repr, odd))
        yield f"the ranks saved different values of {names}: {_fate(base.world_size, world_size)}"
    if base.stage == STAGE_3 and config_of(TreeView.of(first.model)) is None:
        yield "DeepSpeed's config is not in the checkpoint: sub-groups were made for its default sub_group_size"
    yield (
        "the learning rate schedule and global_samples continue where they were; a Trainer that skips seen data skips "
        "the same number of batches, of the new size"
    )
    yield (
        f"the global batch is micro batch x accumulation x ranks: with {_ranks(world_size)} instead of "
        f"{base.world_size} it is {world_size / base.world_size:.3g} times what it was unless you change the others"
    )


def _own_values(state: RankState) -> dict[str, bytes]:
    """Return everything but slices in the rank's trees, by key, as comparable bytes."""
    outer = TreeView.of(state.optimizer)["optimizer_state_dict"]
    values: dict[Tree, Tree] = {**outer.mapping(), **TreeView.of(state.model).mapping()}
    return {str(key): same_bytes(value) for key, value in values.items() if key not in _OF_THE_RANK}


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
