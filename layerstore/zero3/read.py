"""
Read a checkpoint's files into a `Checkpoint`: layers with the positions of their slices, and each rank's state.

Nothing is guessed. No payloads are read except step counters, and buffers, which are compared between ranks. A live
save reads one rank at a time; see `share_of`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePath

from layerstore.dtypes import by_code
from layerstore.errors import LayoutMismatch
from layerstore.filenames import TRAINER_STATE
from layerstore.framing import canonical_order
from layerstore.hashing import NameHasher, object_id
from layerstore.layers import layer_of, layers_in_order
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import Buffer, Kind, Parameter, Slice
from layerstore.slices import slice_length, valid_elements
from layerstore.source import GatheredFileSource, GatheredSource, open_source, read_gathered
from layerstore.states import BufferContent, FlatContent, FragmentContent, RankState, TreeFile
from layerstore.tree import Located, Storage, Tensor, changed, replace_tensors, with_content
from layerstore.zero3.discovery import FoundCheckpoint, check_companions, checked_step, step_of_trainer
from layerstore.zero3.pt import PtFile
from layerstore.zero3.rank_files import (
    Common,
    RankSource,
    agreed,
    check_rank,
    check_saved_as_named,
    common_of,
    parameters_of,
    read_ranks,
)
from layerstore.zero3.trees import Fragment, TreeView

_KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceSource(Slice):
    """The position of one slice of a layer in the source."""

    begin: int = 0
    """The index of its first element in the parameter."""
    box: tuple[int, ...] = ()
    """Its position in the parameter if its elements are not contiguous: first indices, then extents, by dimension."""
    path: Path
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectSource:
    """The slices of one new object."""

    kind: Kind
    shard: int
    shards: int
    slices: tuple[SliceSource, ...]
    """In the canonical order of an object's file."""

    @property
    def size_bytes(self) -> int:
        """The size of its slices."""
        return sum([part.size_bytes for part in self.slices])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """One layer of the checkpoint."""

    layer: str
    parameters: tuple[Parameter, ...]
    """By name."""
    buffers: tuple[Buffer, ...]
    """By name."""
    objects: tuple[ObjectSource, ...]
    """By kind, then by shard."""
    optimizer_step: int | None
    """The optimizer's update count; None if there is no counter, or if counters differ."""
    cut: str = "even"
    """How parameters are split into slices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint."""

    found: FoundCheckpoint
    step: int
    world_size: int
    stage: int
    layers: tuple[LayerSource, ...]
    """In the model's order."""
    states: tuple[RankState, ...]
    """By rank, without files and gathered weights; small storages are still ``Located``."""
    gathered: tuple[GatheredFileSource, ...]
    whole: tuple[GatheredSource, ...] = ()
    """Under stages 1 and 2, the trained weights in the model's file, which should equal their rounded masters."""
    files: tuple[Path, ...]
    """Files that are kept byte for byte."""
    checks: tuple[tuple[str, Located], ...]
    """Record name and position of every storage in every ``.pt`` file; `Located` has the checksum of its bytes."""
    notes: tuple[str, ...]
    """Messages for the user about what was left out or looks odd."""
    layer_pattern: str | None
    """The rule that names layers, if it is not the built-in one."""
    flags: tuple[str, ...] = ()
    """Features of its commit that a reader must support."""
    is_doubted: bool = False
    """Whether the update counts of engine and optimizer differ; if so, the files may come from two saves."""

    @property
    def source(self) -> Path:
        """The folder that was read."""
        return self.found.folder / self.found.tag if self.found.ranks else self.found.folder

    @property
    def size_bytes(self) -> int:
        """The size of all its files."""
        return sum(size_bytes for size_bytes, _ in self.found.stamps.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's share of a checkpoint: its slices and its state."""

    rank: int
    world_size: int
    stage: int
    layers: tuple[LayerSource, ...]
    """Every layer, in the model's order, with only this rank's objects."""
    state: RankState
    """Without files."""
    agreement: str
    """A hash of everything that the ranks of one save must agree on."""


# -- all ranks ---------------------------------------------------------------------------------------------------------


def read_checkpoint(
    found: FoundCheckpoint,
    *,
    layer_pattern: re.Pattern[str] | None = None,
    allowed_globals: frozenset[str] = frozenset(),
) -> Checkpoint:
    """
    Describe the checkpoint *found*.

    Raises:
        SourceCheckpoint: A file is damaged, incomplete or untrusted.
        LayoutMismatch: The files of its ranks contradict each other, or a length does not fit its parameter.
        Unsupported: A setting kept state out of the files.
    """
    ranks = read_ranks(found.ranks, allowed_globals)
    common = agreed(ranks)
    check_saved_as_named(ranks)
    for rank in ranks:
        check_rank(rank, common)
    check_companions(found, common.dp_world_size)
    parameters = parameters_of(ranks[0], common.param_shapes)
    gathered, files = read_gathered(found.others, parameters=parameters, buffers=common.buffers)
    doubts = tuple(_doubts(ranks[0], common.optimizer_steps))
    return Checkpoint(
        found=found,
        step=_trainer_step(found, default=checked_step(common.global_steps, ranks[0].model.path)),
        world_size=common.dp_world_size,
        stage=common.stage,
        layers=_cut_layers(ranks, common, parameters, pattern=layer_pattern),
        states=tuple(_state_of(rank, found.folder, common.buffers) for rank in ranks),
        gathered=gathered,
        whole=tuple(_whole_weights(ranks[0])),
        files=files,
        checks=tuple(_storage_checks(ranks)),
        notes=(*found.notes, *doubts),
        layer_pattern=None if layer_pattern is None else layer_pattern.pattern,
        is_doubted=bool(doubts),
    )


def _doubts(rank: RankSource, steps: list[int | None]) -> Iterator[str]:
    """
    Yield a note if the optimizer and the engine have counted different numbers of updates.

    That is no error, because an optimizer can be newer than the engine's counter, or begin anew.
    """
    updates = rank.model["global_steps"].integer() - rank.model["skipped_steps"].integer()
    counted = sorted({step for step in steps if step is not None})
    # DeepSpeed up to 0.13.1 made an empty first update of its own.
    if any(counted) and not set(counted) <= {updates, updates + 1}:
        yield (
            f"the optimizer has counted {', '.join(map(str, counted))} updates, the engine {updates}: "
            f"are the files of {rank.model.path.parent} from one save?"
        )


def _trainer_step(found: FoundCheckpoint, *, default: int) -> int:
    """Return the trainer's own step if it saved one, since the engine's counter may have started at another step."""
    path = found.folder / TRAINER_STATE
    return step_of_trainer(path) if path in found.others else default


def _storage_checks(ranks: list[RankSource]) -> Iterator[tuple[str, Located]]:
    for rank in ranks:
        # Under stages 1 and 2, all ranks share one model file, which is checked once.
        has_own_model = not rank.has_whole_model or rank is ranks[0]
        for file in (rank.model_file, rank.optimizer_file) if has_own_model else (rank.optimizer_file,):
            for number, storage in enumerate(file.storages):
                assert isinstance(storage.content, Located)
                if storage.content.size_bytes:
                    yield f"data/{number}", storage.content


def _state_of(rank: RankSource, folder: PurePath, buffers: Mapping[str, Buffer]) -> RankState:
    """Return the rank's trees without the bytes of layers."""
    # By identity, because tensors may be equal; the trees keep them alive, so ids stay unique.
    contents: dict[int, object] = {
        id(flat.tensor): FlatContent(state=flat.state, group=flat.group) for flat in rank.flats
    }
    whole: dict[object, Storage] = {}
    for name, weights in rank.weights.items() if rank.has_whole_model else ():
        tensor = weights.tensor()
        shared = with_content(tensor, FragmentContent(parameter=name)).storage
        whole[tensor.storage, tensor.offset] = shared
        # Stage 2 saves frozen weights again, as copies if they are on a device.
        again = rank.model.optional("frozen_param_fragments").get(name)
        if isinstance(again, Tensor) and _is_copy(again, other=tensor):
            whole[again.storage, again.offset] = shared
    for name, fragment in rank.fragments.items() if not rank.has_whole_model else ():
        contents[id(fragment.value)] = FragmentContent(parameter=name)
    for name in buffers:
        contents[id(rank.model["module"][name].value)] = BufferContent(buffer=name)

    def replacement(tensor: Tensor) -> Tensor:
        shared = whole.get((tensor.storage, tensor.offset))
        if shared is not None and shared.elements == tensor.elements and tensor.is_contiguous:
            return replace(tensor, storage=shared, offset=0)
        content = contents.get(id(tensor))
        return tensor if content is None else with_content(tensor, content)

    def file(source: PtFile) -> TreeFile:
        path = source.path.relative_to(folder).as_posix()
        return TreeFile(path=path, tree=replace_tensors(source.tree, replacement))

    model = file(rank.model_file)
    if rank.has_whole_model and rank.rank:  # only the first rank records which parameters share memory
        model = replace(model, tree=changed(TreeView.of(model).mapping(), {"shared_params": {}}))
    return RankState(rank=rank.rank, model=model, optimizer=file(rank.optimizer_file), files=(), gathered=())


def _is_copy(tensor: Tensor, *, other: Tensor) -> bool:
    """Whether both tensors fill their storages, and the storages agree in size, element type and checksum."""
    ours, theirs = tensor.storage.content, other.storage.content
    assert isinstance(ours, Located), "trees that were just read point into their files"
    assert isinstance(theirs, Located), "trees that were just read point into their files"
    are_whole = tensor.elements == tensor.storage.elements == other.storage.elements == other.elements
    is_same = (ours.size_bytes, ours.crc32) == (theirs.size_bytes, theirs.crc32)
    return are_whole and is_same and tensor.storage.dtype == other.storage.dtype


def _whole_weights(rank: RankSource) -> Iterator[GatheredSource]:
    for name, weights in rank.weights.items() if rank.has_whole_model else ():
        if name not in rank.fragments:
            whole = Fragment(name=name, begin=0, elements=weights.tensor().elements, start=0)
            for _, part in _slices(Kind.WEIGHTS, weights.tensor(), [whole]):
                yield GatheredSource(
                    file=part.path,
                    name=name,
                    dtype=part.dtype,
                    shape=tuple(weights.tensor().shape),
                    offset_bytes=part.offset_bytes,
                    supplier=name,
                )


# -- one rank ----------------------------------------------------------------------------------------------------------


def share_of(rank: RankSource, *, folder: PurePath, pattern: re.Pattern[str] | None) -> Share:
    """
    Return the share of *rank*; the paths of its files are below *folder*.

    The caller joins the shares of all ranks. It checks that they agree, compares their buffers, and takes the tied
    names from rank 0, the only rank that records them.

    Raises:
        LayoutMismatch: A length does not fit its parameter.
        Unsupported: Part of the optimizer's state was offloaded, or whole weights are not contiguous.
    """
    common = common_of(rank)
    check_rank(rank, common)
    return Share(
        rank=rank.rank,
        world_size=common.dp_world_size,
        stage=common.stage,
        layers=_cut_layers([rank], common, parameters_of(rank, common.param_shapes), pattern=pattern),
        state=_state_of(rank, folder, common.buffers),
        agreement=object_id(repr(common).encode()),
    )


# -- slices of layers --------------------------------------------------------------------------------------------------


def _cut_layers(
    ranks: list[RankSource], common: Common, parameters: Mapping[str, Parameter], *, pattern: re.Pattern[str] | None
) -> tuple[LayerSource, ...]:
    """Return every layer, in the model's order, with the slices of *ranks*; *pattern* decides layers' names."""
    groups, world_size = common.param_shapes, common.dp_world_size
    buffers = common.buffers

    objects: dict[str, list[ObjectSource]] = {}
    for rank in ranks:
        sharded, whole = _flat_slices(rank), list[tuple[Kind, SliceSource]]()
        if not rank.has_whole_model:
            sharded += _frozen_slices(rank, parameters, world_size)
        elif rank.rank == 0:
            whole += _frozen_slices(rank, parameters, 1)
        for slices, shard, shards in ((sharded, rank.rank, world_size), (whole, 0, 1)):
            for name, source in _by_layer(slices, pattern, shard=shard, shards=shards):
                objects.setdefault(name, []).append(source)
    # Under stages 1 and 2, all ranks share one model file, and so one copy of the buffers.
    with_buffers = [rank for rank in ranks if not rank.has_whole_model or rank.rank == 0]
    for name, source in _buffer_objects(with_buffers, buffers, pattern) if with_buffers else ():
        objects.setdefault(name, []).append(source)
    module = [str(name) for name in ranks[0].model["module"].mapping() if name in parameters or name in buffers]
    return tuple(
        LayerSource(
            layer=name,
            parameters=tuple(parameters[member] for member in sorted(members) if member in parameters),
            buffers=tuple(buffers[member] for member in sorted(members) if member in buffers),
            objects=tuple(sorted(objects.get(name, ()), key=lambda source: (_KINDS.index(source.kind), source.shard))),
            optimizer_step=_common_step(
                common.optimizer_steps[group]
                for group, sub_group in enumerate(groups)
                if sub_group.keys() & set(members)
            ),
            cut=ranks[0].sharding.cut,
        )
        for name, members in layers_in_order(module, pattern=pattern).items()
    )


def _common_step(steps: Iterable[int | None]) -> int | None:
    counts = set(steps)
    return counts.pop() if len(counts) == 1 else None


def _flat_slices(rank: RankSource) -> list[tuple[Kind, SliceSource]]:
    slices = []
    for flat in rank.flats:
        kind = Kind.OPTIMIZER if flat.state else Kind.MASTER
        slices += _slices(kind, flat.tensor, rank.fragments_of(flat.group), state=flat.state)
    return slices


def _frozen_slices(
    rank: RankSource, parameters: Mapping[str, Parameter], world_size: int
) -> Iterator[tuple[Kind, SliceSource]]:
    """Yield this rank's slices of frozen parameters; if *world_size* is 1, each slice is a whole parameter."""
    for name, fragment in rank.fragments.items():
        elements = prod(parameters[name].shape)
        tensor, expected = fragment.tensor(), slice_length(elements, world_size)
        if tensor.elements != expected or not tensor.is_contiguous:
            raise LayoutMismatch(
                f"{rank.model.path}: the fragment of frozen parameter {name!r} has {tensor.elements} elements, "
                f"expected {expected}"
            )
        valid = valid_elements(elements, world_size, rank.rank)
        part = Fragment(name=name, begin=rank.rank * expected, elements=valid, start=0)
        yield from _slices(Kind.WEIGHTS, tensor, [part])


def _slices(
    kind: Kind, tensor: Tensor, parts: Iterable[Fragment], *, state: str = ""
) -> list[tuple[Kind, SliceSource]]:
    """Return the slices that are *parts* of *tensor*, except those that are nothing but padding."""
    located, dtype = tensor.storage.content, tensor.storage.dtype
    assert isinstance(located, Located), "trees that were just read point into their files"
    item_bytes = by_code(dtype).bytes
    return [
        (
            kind,
            SliceSource(
                name=part.name,
                state=state,
                dtype=dtype,
                elements=part.elements,
                begin=part.begin,
                path=located.path,
                offset_bytes=located.offset_bytes + (tensor.offset + part.start) * item_bytes,
            ),
        )
        for part in parts
        if part.elements
    ]


def _by_layer(
    slices: Iterable[tuple[Kind, SliceSource]], pattern: re.Pattern[str] | None, *, shard: int, shards: int
) -> Iterator[tuple[str, ObjectSource]]:
    by_layer = defaultdict[tuple[str, Kind], list[SliceSource]](list)
    for kind, source in slices:
        by_layer[layer_of(source.name, pattern=pattern), kind].append(source)
    for (name, kind), members in by_layer.items():
        yield name, ObjectSource(kind=kind, shard=shard, shards=shards, slices=tuple(canonical_order(members)))


def _buffer_objects(
    ranks: list[RankSource], buffers: Mapping[str, Buffer], pattern: re.Pattern[str] | None
) -> Iterator[tuple[str, ObjectSource]]:
    """Yield one object per layer if all ranks hold the same buffers, else one per rank."""
    by_rank = [
        dict(_by_layer(_buffer_slices(rank, buffers), pattern, shard=rank.rank, shards=len(ranks))) for rank in ranks
    ]
    for name, source in by_rank[0].items():
        if all(_digests(objects[name]) == _digests(source) for objects in by_rank[1:]):
            yield name, ObjectSource(kind=Kind.BUFFERS, shard=0, shards=1, slices=source.slices)
        else:
            yield from ((name, objects[name]) for objects in by_rank)


def _buffer_slices(rank: RankSource, buffers: Mapping[str, Buffer]) -> Iterator[tuple[Kind, SliceSource]]:
    module = rank.model["module"]
    for name in buffers:
        tensor = module[name].tensor()
        yield from _slices(Kind.BUFFERS, tensor, [Fragment(name=name, begin=0, elements=tensor.elements, start=0)])


def _digests(source: ObjectSource) -> str:
    # A buffer may be part of its storage, and the file has checksums of whole storages only.
    hasher = NameHasher()
    for part in source.slices:
        with open_source(part.path) as file:
            for start in range(0, part.size_bytes, IO_CHUNK_BYTES):
                hasher.update(file.read_at(part.offset_bytes + start, min(IO_CHUNK_BYTES, part.size_bytes - start)))
    return hasher.id()
