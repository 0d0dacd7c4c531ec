"""What does not carry over to a composite or to its number of ranks, in plain sentences."""

from collections.abc import Iterator

from layerstore.compose import Composition
from layerstore.filenames import RANDOM_STATE, WEIGHTS_FILE
from layerstore.layers import strip_wrappers
from layerstore.model import CommitRecord, RankState, TensorSource
from layerstore.slices import Slices
from layerstore.storage import Repository
from layerstore.tree import Tree
from layerstore.zero3.trees import STAGE_3, TreeView, config_of, same_bytes

# What ranks have for themselves: only the first one's file has some of these.
_OF_THE_RANK = frozenset({"shared_params", "single_partition_of_fp32_groups", "group_paddings", "param_slice_mappings"})


def moments_notes(composition: Composition, *, is_fresh: bool) -> Iterator[str]:
    """Say what the optimizer begins with, if that is not what fits the weights."""
    if is_fresh:
        yield (
            "the optimizer's moments are zero and its counters 0, as before the first step, but the learning rate "
            "schedule continues: begin it anew, with a warm-up"
        )
    elif composition.mean is not None:
        base = composition.base
        yield f"the optimizer's moments are those of {base.run}@{base.step}, not averaged; --moments fresh zeroes them"


def buffer_notes(slices: Slices, world_size: int) -> Iterator[str]:
    """Name buffers that each rank had for itself, if there are more ranks now, or fewer."""
    odd = {name: shards for name, shards in slices.rank_buffers().items() if shards != world_size}
    if odd:
        name, shards = next(iter(odd.items()))
        others = f" and {len(odd) - 1} others" if len(odd) > 1 else ""
        yield f"buffer {name!r}{others} differed between the {shards} ranks that saved it: {_fate(shards, world_size)}"


def _fate(before: int, after: int) -> str:
    """Say what happens to values that differ between *before* ranks."""
    if before < after:
        return f"ranks from {before} on take those of rank 0"
    return f"those of ranks from {after} on are left out"


def gathered_notes(first: RankState, slices: Slices) -> Iterator[str]:
    """Name gathered weights that are not derived from the layers: in a mixture they are still the base's."""
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


def notes_of_states(repo: Repository, base: CommitRecord, first: RankState, *, world_size: int) -> Iterator[str]:
    """Say what changes with the number of ranks."""
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
        "the learning rate schedule and global_samples continue where they were; a Trainer that skips what it has seen "
        "skips as many batches, of the new size"
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
