"""
The ranks' files, read and held against each other.

Ranks that disagree, a length that does not fit, or a setting that keeps state out of the files
are errors that name what was found: the engine's own loader would take most of them in silence.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.limits import WORKERS_MAX
from layerstore.tree import Located, Size, Tensor, Tree
from layerstore.zero3.checkpoint import StorageCheck
from layerstore.zero3.discover import SHARD_STEM, RankFiles
from layerstore.zero3.ptfile import PtFile, read_pt
from layerstore.zero3.slices import elements_of, slice_length
from layerstore.zero3.trees import TreeView, refuse_settings, sub_group_shapes
from layerstore.zero3.undivided import undivided_in

MASTER = ""
"""What stands for the state of a master, which is no state of the optimizer."""

# What Adam, Lion, SGD and their kin call what they keep for every element.
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})

Agreed = TypeVar("Agreed")
Groups = list[dict[str, Size]]
"""The parameters of every sub-group with their shapes, in flat order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """One flat buffer of one rank: a sub-group's masters, or one of its optimizer states."""

    state: str
    group: int
    tensor: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSource:
    """One rank's two files, read."""

    rank: int
    model_file: PtFile
    optimizer_file: PtFile
    flats: tuple[Flat, ...]

    @property
    def model(self) -> TreeView:
        """The tree of ``model_states``."""
        return TreeView(self.model_file.tree, path=self.model_file.path)


def read_ranks(pairs: tuple[RankFiles, ...], allowed_globals: frozenset[str]) -> list[RankSource]:
    """Read every rank's pair of files; raises Unsupported where a setting kept state out of them."""

    def read(pair: RankFiles) -> RankSource:
        return rank_source(
            pair.rank,
            read_pt(pair.model, allowed_globals=allowed_globals),
            read_pt(pair.optimizer, allowed_globals=allowed_globals),
        )

    with ThreadPoolExecutor(WORKERS_MAX) as pool:
        return list(pool.map(read, pairs))


def rank_source(rank: int, model_file: PtFile, optimizer_file: PtFile) -> RankSource:
    """Return one rank's two files with their flat buffers; raises Unsupported where state was kept out of them."""
    model = TreeView(model_file.tree, path=model_file.path)
    optimizer = TreeView(optimizer_file.tree, path=optimizer_file.path)["optimizer_state_dict"]
    refuse_settings(model, optimizer)
    return RankSource(
        rank=rank, model_file=model_file, optimizer_file=optimizer_file, flats=tuple(_flats(optimizer, model))
    )


def check_saved_as_named(ranks: list[RankSource]) -> None:
    """Raise if a file was saved as another rank's, or as the other half: nothing but the archive's folder tells."""
    for file in (file for rank in ranks for file in (rank.model_file, rank.optimizer_file)):
        if SHARD_STEM.fullmatch(file.root) and file.root != file.path.stem:
            raise LayoutMismatch(
                f"{file.path} was saved as {file.root}.pt: it was copied or renamed, and is another rank's",
                hint="put every rank's own files back in their places",
            )


def world_size_of(ranks: list[RankSource]) -> int:
    """Return how many ranks saved the checkpoint; raises unless exactly their files are here."""
    world_size = agreed(ranks, "dp_world_size", lambda rank: rank.model["dp_world_size"].integer())
    partitions = agreed(ranks, "partition_count", _partition_count)
    if partitions != world_size:
        raise LayoutMismatch(
            f"the files of {ranks[0].model.path.parent} are mixed: "
            f"the optimizer was cut for {partitions} ranks, the model for {world_size}",
            hint="ranks of one save belong together; ingest another checkpoint",
        )
    if len(ranks) < world_size:
        raise SourceCheckpoint(
            f"{ranks[0].model.path.parent} is incomplete: it was saved by {world_size} ranks; "
            f"missing: {len(ranks)}{f' to {world_size - 1}' if world_size - len(ranks) > 1 else ''}",
            hint="copy the missing files from the nodes that wrote them, or ingest another checkpoint",
        )
    if len(ranks) > world_size:
        raise LayoutMismatch(
            f"{ranks[0].model.path.parent} holds files of {len(ranks)} ranks, but was saved by {world_size}",
            hint="remove the files that an earlier save of another world size left behind",
        )
    return world_size


def _partition_count(rank: RankSource) -> int:
    tree = TreeView(rank.optimizer_file.tree, path=rank.optimizer_file.path)
    return tree["optimizer_state_dict"]["partition_count"].integer()


def agreed(ranks: list[RankSource], what: str, look: Callable[[RankSource], Agreed]) -> Agreed:
    """Return what all ranks say of *what*; raise LayoutMismatch with the values where they differ."""
    values = [look(rank) for rank in ranks]
    first = values[0]
    for rank, value in zip(ranks, values, strict=True):
        if value != first:
            detail = f": {_short(first)} and {_short(value)}"
            raise LayoutMismatch(
                f"the files of {ranks[0].model.path.parent} are mixed: {what} differs at rank {rank.rank}{detail}",
                hint="ranks of one save belong together; ingest another checkpoint",
            )
    return first


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def param_shapes(rank: RankSource) -> Groups:
    """Return the rank's ``param_shapes``: what lies in each flat buffer, in which order."""
    return sub_group_shapes(rank.model)


def _flats(optimizer: TreeView, model: TreeView) -> Iterator[Flat]:
    masters = optimizer["fp32_flat_groups"].children()
    states = optimizer["optimizer_state_dict"]["state"]
    _check_states_present(states, len(masters), model)
    lengths = {group: master.tensor().elements for group, (_, master) in enumerate(masters)}
    names = _sliced(states, lengths)
    # A quantized moment is no slice, however long: it means nothing without its block's scale, and the zero that
    # pads it is no zero.
    is_whole = bool(undivided_in(states, lambda key, _: key in names))
    for group, (_, master) in enumerate(masters):
        yield Flat(state=MASTER, group=group, tensor=master.tensor())
        state = None if is_whole else states.get(group)
        for key, value in state.children() if state is not None else ():
            if _is_flat(value.value, lengths[group]):
                if not isinstance(key, str) or key == MASTER:
                    raise SourceCheckpoint(f"{optimizer.path}: an optimizer state is called {key!r}")
                yield Flat(state=key, group=group, tensor=value.value)


def _sliced(states: TreeView, lengths: Mapping[int, int]) -> set[Tree]:
    """Return the names of the states that have one number for each of a sub-group's."""
    found = {
        key
        for group, elements in lengths.items()
        if (state := states.get(group)) is not None
        for key, value in state.children()
        if _is_flat(value.value, elements)
    }
    return found | _MOMENTS


def _is_flat(value: Tree, elements: int) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and tuple(value.shape) == (elements,)


def _check_states_present(states: TreeView, groups: int, model: TreeView) -> None:
    """Refuse settings under which some moments live where no file holds them."""
    filled = sum(bool(state.mapping()) for _, state in states.children())
    has_stepped = model["global_steps"].integer() > model["skipped_steps"].integer()
    if 0 < filled < groups or (not filled and has_stepped and groups and not _may_be_stateless(model)):
        raise Unsupported(
            f"{states.path} holds the optimizer state of {filled} of {groups} sub-groups: "
            "the rest was never saved (Twin-Flow's offload ratio below 1, or SuperOffload)",
            hint="save without offload_optimizer.ratio and super_offload",
        )


def _may_be_stateless(model: TreeView) -> bool:
    """Whether it can be the optimizer's own way to keep no state (plain SGD): it was not offloaded to anywhere."""
    config = model.get("ds_config")
    zero = None if config is None or not isinstance(config.value, dict) else config.get("zero_optimization")
    if zero is None:
        return False  # nothing tells: rather refuse than lose moments
    offload = zero.mapping().get("offload_optimizer")
    return offload is None or (isinstance(offload, dict) and offload.get("device") in {None, "none"})


def check_flats(ranks: list[RankSource], groups: Groups, world_size: int) -> None:
    """Raise unless every flat buffer is exactly as long as its parameters' slices."""
    agreed(ranks, "the optimizer's states", _kinds_of_flats)
    expected = [sum(slice_length(elements_of(shape), world_size) for shape in group.values()) for group in groups]
    for rank in ranks:
        path = rank.optimizer_file.path
        count = sum(flat.state == MASTER for flat in rank.flats)
        if count != len(groups):
            raise LayoutMismatch(f"{path} has {count} flat groups, param_shapes has {len(groups)}")
        for flat in rank.flats:
            found = flat.tensor.elements
            if found == 0 and expected[flat.group]:
                raise Unsupported(
                    f"{path}: flat group {flat.group} is empty: its optimizer was offloaded to NVMe",
                    hint="save with offload_optimizer.device 'cpu' or 'none'",
                )
            if found != expected[flat.group] or not flat.tensor.is_contiguous:
                raise LayoutMismatch(
                    f"{path}: {flat.state or 'master'} of flat group {flat.group} has {found} elements, "
                    f"its parameters need {expected[flat.group]} (first: {next(iter(groups[flat.group]), 'none')})"
                )


def check_states(ranks: list[RankSource]) -> None:
    """
    Raise unless whatever is a sliced state in one sub-group is one in all that have it.

    A moment of another length would pass for a scalar of its sub-group, and leave its layers.
    """
    for rank in ranks:
        lengths = {flat.group: flat.tensor.elements for flat in rank.flats if flat.state == MASTER}
        tree = TreeView(rank.optimizer_file.tree, path=rank.optimizer_file.path)
        states = tree["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        sliced = _sliced(states, lengths)
        for group, state in states.children():
            for key, value in state.children():
                length = lengths.get(group, -1) if isinstance(group, int) else -1
                if key in sliced and isinstance(value.value, Tensor) and not _is_flat(value.value, length):
                    shape = tuple(value.tensor().shape)
                    raise LayoutMismatch(
                        f"{rank.optimizer_file.path}: {key!r} of flat group {group!r} has shape {shape}, "
                        "which is not the length of its parameters",
                        hint="the file is damaged, or its optimizer is not supported",
                    )


def _kinds_of_flats(rank: RankSource) -> list[tuple[str, int, str]]:
    return [(flat.state, flat.group, flat.tensor.storage.dtype) for flat in rank.flats]


def storage_checks(ranks: list[RankSource]) -> Iterator[StorageCheck]:
    """Yield every record with bytes of every ``.pt`` file."""
    for rank in ranks:
        for file in (rank.model_file, rank.optimizer_file):
            for number, storage in enumerate(file.storages):
                assert isinstance(storage.content, Located)
                if storage.content.size_bytes:
                    yield StorageCheck(key=f"data/{number}", located=storage.content)
