"""
Transfer: stage a checkpoint's content in the store, without making any of it visible.

Objects come first, then version blobs and state blobs. Every byte of the source is checked against its checksum before
`transfer` returns, so that rot is never stored under a valid hash.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from layerstore.coding import Error
from layerstore.errors import LayoutMismatch
from layerstore.filenames import owner_of_file
from layerstore.framing import canonical_order
from layerstore.ingest.derive import Compared, Gathered, GatheredCheck
from layerstore.limits import WORKERS_MAX
from layerstore.model import Kind, ObjectId, StoredObject
from layerstore.progress import Progress, Silent
from layerstore.shares import cut
from layerstore.source import GatheredSource, stat_source
from layerstore.staging import (
    NONE_COMPACT,
    Checksums,
    Compact,
    CompactLayers,
    Content,
    KeptFile,
    SourceReader,
    Staging,
    coding_losses,
    crc32_of,
    stage_version,
)
from layerstore.states import GatheredFile, GatheredTensor, TensorSource
from layerstore.storage import ObjectWriter, Repository, Staged
from layerstore.threads import Threads, run_all
from layerstore.zero3 import Checkpoint, LayerSource, ObjectSource, SliceSource, check_unchanged


def transfer(
    repo: Repository,
    checkpoint: Checkpoint,
    writer: ObjectWriter,
    progress: Progress,
    *,
    due: Collection[str],
    known_before: bool,
    moments: bool = True,
    compact: CompactLayers = NONE_COMPACT,
) -> Content:
    """
    Stage the layers *due* of *checkpoint*, with or without their *moments*, and everything that is not a layer.

    Layers in *compact* are kept in fewer bytes. With *known_before*, the store is likely to have all of the content
    already. All processes that share the work in *repo* stage layers; only this one stages the rest.

    Raises:
        SourceCheckpoint: A byte of the source has changed since it was written, or a file changed while it was read.
    """
    source = _Source(folder=checkpoint.found.folder, gathered=Gathered.of(checkpoint), known_before=known_before)
    with _reading(source, writer, progress, _workers(codes=bool(compact.older))) as readers:
        content = _Transfer(repo, checkpoint, source, readers, writer, due, moments, compact).run(progress)
        readers.checksums.check(checkpoint.checks, readers.reader)
    # Check this last, to notice a file that changed while it was read.
    check_unchanged(checkpoint.found)
    return content


_BATCHES = 32
"""Batches for each thread: enough that no thread is idle for long at the end."""

Planned = tuple[ObjectSource, Compact | None]
"""An object to stage, and how it is coded; None if it is kept as it is."""


# -- one process's share -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What each process needs to know about the checkpoint."""

    folder: Path
    gathered: Gathered
    known_before: bool


@dataclass(frozen=True, slots=True)
class _Readers:
    """Reads the source, and notes what it has seen."""

    staging: Staging
    reader: SourceReader
    gathered: SourceReader
    """A reader for gathered weights, which are read while a chunk of slices is in use."""
    checksums: Checksums
    check: GatheredCheck
    pool: ThreadPoolExecutor

    def objects(self, sources: Sequence[Planned]) -> list[StoredObject]:
        """Stage *sources*, comparing them with the gathered weights on the way."""
        # Small objects come in thousands, so they are handed out in batches.
        count = max(1, len(sources) // (_BATCHES * WORKERS_MAX))
        batches = [sources[start : start + count] for start in range(0, len(sources), count)]
        return list(chain.from_iterable(run_all(self.pool, self._staged, batches)))

    def _staged(self, batch: Sequence[Planned]) -> list[StoredObject]:
        return [self.staging.planned(source, how, self.check.witness(source)) for source, how in batch]


@contextmanager
def _reading(source: _Source, writer: ObjectWriter, progress: Progress, workers: int) -> Iterator[_Readers]:
    with (
        closing(SourceReader()) as reader,
        closing(SourceReader()) as gathered,
        # The pool comes last, so that it ends first: its threads read through both readers.
        Threads(workers) as pool,
    ):
        checksums = Checksums()
        staging = Staging(
            writer,
            reader,
            source=str(source.folder),
            checksums=checksums,
            advance=progress.advance,
            known_before=source.known_before,
        )
        yield _Readers(staging, reader, gathered, checksums, GatheredCheck(source.gathered, gathered), pool)


def _workers(*, codes: bool) -> int:
    """Return how many threads stage objects; copying waits for the disk, coding for processors and the GIL."""
    return min(WORKERS_MAX, max(2, len(os.sched_getaffinity(0)))) if codes else WORKERS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedShare:
    """What another process has staged and seen."""

    objects: list[StoredObject]
    staged: Staged
    known: Mapping[Path, Mapping[int, tuple[int, int]]]
    compared: Compared
    losses: Mapping[ObjectId, dict[str, Error]]


@contextmanager
def stage_share(repo: Repository, part: tuple[_Source, list[Planned], bool]) -> Iterator[_StagedShare]:
    """Stage some objects for the leading process, which publishes them; the unpublished rest is removed."""
    source, objects, reads_reused = part
    with (
        repo.writer(reads_reused=reads_reused) as writer,
        _reading(source, writer, Silent(), _workers(codes=any(how for _, how in objects))) as readers,
    ):
        stored = readers.objects(objects)
        yield _StagedShare(
            objects=stored,
            staged=writer.staged,
            known=readers.checksums.known,
            compared=readers.check.compared,
            losses=readers.staging.losses,
        )


# -- one checkpoint ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Transfer:
    repo: Repository
    checkpoint: Checkpoint
    source: _Source
    readers: _Readers
    writer: ObjectWriter
    due: Collection[str]
    moments: bool
    compact: CompactLayers

    def run(self, progress: Progress) -> Content:
        layers = [layer for layer in self.checkpoint.layers if layer.layer in self.due]
        world_size = self.checkpoint.world_size
        sources = [
            (layer.layer, (source, self.compact.plan(layer.layer, source)))
            for layer in layers
            for source in layer.objects
            if self.moments or source.kind is not Kind.OPTIMIZER
        ]
        sources.sort(key=lambda item: item[1][0].shard)  # a rank's file is read in one go, and by few processes
        objects: dict[str, list[StoredObject]] = {layer.layer: [] for layer in layers}
        stored = self._objects([source for _, source in sources], progress)
        for (name, _), stored_object in zip(sources, stored, strict=True):
            objects[name].append(stored_object)
        losses = tuple(
            loss for layer in layers for loss in coding_losses(layer.layer, objects[layer.layer], self.readers.staging)
        )
        # Only now is it known which gathered weights follow from their masters.
        notes = tuple(self._doubts(layers))
        for layer in layers:
            objects[layer.layer].extend(self._own_weights(layer))
        gathered = list(self._gathered())
        states = [
            self.readers.staging.state(state, self._files_of(state.rank), gathered if state.rank == 0 else [])
            for state in self.checkpoint.states
        ]
        return Content(
            versions={
                layer.layer: stage_version(
                    self.writer,
                    layer,
                    objects[layer.layer],
                    world_size=world_size,
                    references=self.compact.references(layer.layer),
                )
                for layer in layers
            },
            losses=losses,
            states=tuple(states),
            bytes_derived=self.readers.check.bytes_derived,
            has_moments=self.moments,
            notes=notes,
        )

    def _doubts(self, layers: Sequence[LayerSource]) -> Iterator[str]:
        """Yield a note if all weights in the model's file differ from their masters; raise if another save wrote it."""
        names = {parameter.name for layer in layers for parameter in layer.parameters}
        whole = [tensor for tensor in self.checkpoint.whole if tensor.supplier in names]
        if not whole or any(map(self.readers.check.is_derived, whole)):
            return
        differ = f"{whole[0].file}: none of its weights equals its rounded master"
        if self.checkpoint.is_doubted:
            raise LayoutMismatch(
                f"{differ}, and engine and optimizer have different update counts: the file is from another save",
                hint="put the files of one save together, or ingest another checkpoint",
            )
        yield f"{differ}; they are stored separately, and compose writes them as they are"

    def _objects(self, sources: list[Planned], progress: Progress) -> list[StoredObject]:
        """Stage *sources*, split among the processes."""
        sizes = [source.size_bytes for source, _ in sources]
        # Neighbours stay together, and answers come in the order of the parts: callers match objects by position.
        mine, *theirs = (sources[share.start : share.stop] for share in cut(sizes, count=self.repo.shares.count))
        progress.start("ingest", sum(sizes[: len(mine)]))
        parts = [(self._known_of(part), part, self.writer.reads_reused) for part in theirs]
        with self.repo.shares.scatter_work(self.repo, stage_share, parts) as answers:
            stored = self.readers.objects(mine)
            for staged_share in answers():
                stored += staged_share.objects
                self.writer.join(staged_share.staged)
                self.readers.checksums.join(staged_share.known)
                self.readers.check.join(staged_share.compared)
                self.readers.staging.losses.update(staged_share.losses)
        return stored

    def _known_of(self, sources: Sequence[Planned]) -> _Source:
        """Return what a process needs to know for *sources* alone."""
        names = {part.name for source, _ in sources for part in source.slices}
        return replace(self.source, gathered=self.source.gathered.only(names))

    def _own_weights(self, layer: LayerSource) -> Iterator[StoredObject]:
        """Stage the gathered weights that cannot be derived from their master, as part of their layer."""
        tensors = self.readers.check.weights_to_store(parameter.name for parameter in layer.parameters)
        slices = tuple(canonical_order(_as_slice(tensor) for tensor in tensors if tensor.elements))
        if slices:
            yield self.readers.staging.object(ObjectSource(kind=Kind.WEIGHTS, shard=0, shards=1, slices=slices))

    # -- what is not a layer -------------------------------------------------------------------------------------

    def _gathered(self) -> Iterator[GatheredFile]:
        in_layers = set(self.readers.check.weights_to_store(self.source.gathered.parameters))
        older = [layer for layer in self.checkpoint.layers if layer.layer not in self.due]
        inherited = {parameter.name for layer in older for parameter in layer.parameters}
        inherited |= {buffer.name for layer in older for buffer in layer.buffers}

        def read(tensor: GatheredSource) -> GatheredTensor:
            # A tensor of an inherited layer is taken from that layer's older version, as in a composite.
            return self._gathered_tensor(tensor, in_layer=tensor in in_layers or tensor.supplier in inherited)

        for file in self.checkpoint.gathered:
            tensors = tuple(run_all(self.readers.pool, read, file.tensors))
            yield GatheredFile(path=self._relative(file.path), header=file.header, tensors=tensors)

    def _gathered_tensor(self, tensor: GatheredSource, *, in_layer: bool) -> GatheredTensor:
        stored = None
        # Derived tensors have a checksum too: compose checks its rounded tensors against it.
        checksum, _ = crc32_of(self.readers.gathered, tensor.file, tensor.offset_bytes, tensor.size_bytes)
        if in_layer or self.readers.check.is_derived(tensor):
            is_parameter = tensor.supplier in self.source.gathered.parameters
            source = TensorSource.PARAMETER if is_parameter else TensorSource.BUFFER
        else:
            source = TensorSource.STORED
            stored = self.readers.staging.bytes_object(tensor.file, tensor.offset_bytes, tensor.size_bytes)
        return GatheredTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            elements=tensor.elements,
            crc32=checksum,
            source=source,
            layer_name=tensor.supplier if stored is None else "",
            stored=stored,
        )

    def _files_of(self, rank: int) -> Iterator[KeptFile]:
        """Yield the files that are kept byte for byte: a rank's own and, with rank 0, those that belong to no rank."""
        for path in self.checkpoint.files:
            if owner_of_file(path.name, world_size=self.checkpoint.world_size) == rank:
                state = stat_source(path)
                yield KeptFile(
                    name=self._relative(path),
                    executable=bool(state.st_mode & 0o100),
                    place=path,
                    size_bytes=state.st_size,
                )

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.checkpoint.found.folder).as_posix()


def _as_slice(tensor: GatheredSource) -> SliceSource:
    return SliceSource(
        name=tensor.supplier,
        state="",
        dtype=tensor.dtype,
        elements=tensor.elements,
        path=tensor.file,
        offset_bytes=tensor.offset_bytes,
    )
