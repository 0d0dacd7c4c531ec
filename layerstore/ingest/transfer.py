"""
Bring a checkpoint's content into the store, staged: nothing of it is visible yet.

Objects first, then version blobs and state blobs. Every byte of the source must have shown its checksum
before this returns, so that rot is never kept under a valid hash.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from layerstore.format import canonical_order
from layerstore.ingest.derive import GatheredCheck
from layerstore.limits import INLINE_BYTES_MAX, WORKERS_MAX
from layerstore.model import (
    BlobRef,
    GatheredFile,
    GatheredTensor,
    Kind,
    LayerVersion,
    ObjectContent,
    SourceFile,
    StoredObject,
    TensorSource,
)
from layerstore.progress import Progress
from layerstore.publish import Checksums, SourceReader, Staging, crc32_of, in_order
from layerstore.storage import ObjectWriter
from layerstore.zero3 import (
    Checkpoint,
    GatheredSource,
    LayerSource,
    ObjectSource,
    SliceSource,
    rank_of_file,
    read_source_file,
    stat_source,
)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a commit consists of, but for its numbers."""

    layers: dict[str, LayerVersion]
    """Every layer that was due."""
    versions: dict[str, BlobRef]
    """Of the same."""
    states: tuple[BlobRef, ...]
    """By rank."""
    bytes_derived: int
    """Gathered weights that were not stored because they follow from the masters."""
    has_moments: bool = True


def transfer(
    checkpoint: Checkpoint,
    writer: ObjectWriter,
    progress: Progress,
    *,
    due: Collection[str],
    known_before: bool,
    moments: bool = True,
) -> Content:
    """
    Stage the layers *due* of *checkpoint*, with or without their *moments*, and all that is not a layer.

    *known_before* says that the store is likely to have all of it.

    Raises:
        SourceCheckpoint: A byte of the source is not as it was written; *writer* publishes nothing then.
    """
    with _ThreadReaders() as readers, ThreadPoolExecutor(WORKERS_MAX) as pool:
        moving = _Transfer(checkpoint, writer, progress, readers, due=due, known_before=known_before, moments=moments)
        return moving.run(pool)


class _Transfer:
    """One checkpoint on its way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        writer: ObjectWriter,
        progress: Progress,
        readers: "_ThreadReaders",
        *,
        due: Collection[str],
        known_before: bool,
        moments: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._moments = moments
        self._progress = progress
        self._readers = readers
        self._layers = [layer for layer in checkpoint.layers if layer.layer in due]
        self._inherited = frozenset(
            name
            for layer in checkpoint.layers
            if layer.layer not in due
            for name in (*(of.name for of in layer.parameters), *(of.name for of in layer.buffers))
        )
        self._checksums = Checksums()
        self._staging = Staging(
            writer,
            lambda: readers.slices,
            source=str(checkpoint.found.folder),
            checksums=self._checksums,
            advance=progress.advance,
            known_before=known_before,
        )
        self._check = GatheredCheck(checkpoint)

    def run(self, pool: ThreadPoolExecutor) -> Content:
        layers = self._layers
        sources = [
            (layer.layer, source)
            for layer in layers
            for source in layer.objects
            if self._moments or source.kind is not Kind.OPTIMIZER
        ]
        self._progress.start("ingest", sum(part.size_bytes for _, source in sources for part in source.slices))
        objects: dict[str, list[StoredObject]] = {layer.layer: [] for layer in layers}
        for (name, _), stored in zip(sources, _run_all(pool, self._object, [of for _, of in sources]), strict=True):
            objects[name].append(stored)
        # Only now is it known which gathered weights follow from their masters.
        for layer in layers:
            objects[layer.layer].extend(self._own_weights(layer))
        gathered = [self._gathered(pool, file.path, file.header, file.tensors) for file in self._checkpoint.gathered]
        states = [
            self._staging.state(state, self._files_of(state.rank), gathered if state.rank == 0 else [])
            for state in self._checkpoint.states
        ]
        self._checksums.check(self._checkpoint.checks, self._readers.slices)
        versions = {layer.layer: self._version(layer, objects[layer.layer]) for layer in layers}
        return Content(
            layers=versions,
            versions={name: self._staging.version(version) for name, version in versions.items()},
            states=tuple(states),
            bytes_derived=self._check.bytes_derived,
            has_moments=self._moments,
        )

    # -- layers --------------------------------------------------------------------------------------------------

    def _object(self, source: ObjectSource) -> StoredObject:
        """Stage *source*, comparing it with the gathered weights as it goes by."""
        witness = self._check.witness(source, self._readers.gathered)
        return self._staging.object(source, witness.look if witness else None)

    def _own_weights(self, layer: LayerSource) -> Iterator[StoredObject]:
        """Stage the gathered weights that do not follow from their master, as part of their layer."""
        tensors = self._check.weights_to_store(parameter.name for parameter in layer.parameters)
        slices = tuple(canonical_order(_as_slice(tensor) for tensor in tensors if tensor.elements))
        if slices:
            source = ObjectSource(kind=Kind.WEIGHTS, shard=0, shards=1, slices=slices)
            yield self._staging.object(source)

    def _version(self, layer: LayerSource, objects: list[StoredObject]) -> LayerVersion:
        return LayerVersion(
            layer=layer.layer,
            parameters=layer.parameters,
            buffers=layer.buffers,
            world_size=self._checkpoint.world_size,
            objects=in_order(objects),
        )

    # -- what is not a layer -------------------------------------------------------------------------------------

    def _gathered(
        self, pool: ThreadPoolExecutor, path: Path, header: bytes, tensors: Iterable[GatheredSource]
    ) -> GatheredFile:
        in_layers = set(self._check.weights_to_store(self._check.parameters))

        def read(tensor: GatheredSource) -> GatheredTensor:
            return self._gathered_tensor(tensor, in_layer=tensor in in_layers)

        return GatheredFile(
            path=self._relative(path),
            header=header,
            tensors=tuple(_run_all(pool, read, list(tensors))),
        )

    def _gathered_tensor(self, tensor: GatheredSource, *, in_layer: bool) -> GatheredTensor:
        stored = None
        checksum, _ = crc32_of(self._readers.gathered, tensor.file, tensor.offset_bytes, tensor.size_bytes)
        # What an older version of the layer supplies is no more like these bytes than the layer is.
        if in_layer or tensor.supplier in self._inherited or self._check.is_derived(tensor):
            is_parameter = tensor.supplier in self._check.parameters
            source = TensorSource.PARAMETER if is_parameter else TensorSource.BUFFER
        else:
            source = TensorSource.STORED
            stored = self._staging.bytes_object(tensor.file, tensor.offset_bytes, tensor.size_bytes)
        return GatheredTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            elements=tensor.elements,
            crc32=checksum,
            source=source,
            layer_name=tensor.supplier if stored is None else "",
            stored=stored,
        )

    def _files_of(self, rank: int) -> Iterator[SourceFile]:
        for path in self._checkpoint.files:
            if _owner(path, self._checkpoint.world_size) == rank:
                yield self._source_file(path)

    def _source_file(self, path: Path) -> SourceFile:
        state = stat_source(path)
        content: bytes | ObjectContent
        if state.st_size > INLINE_BYTES_MAX:
            content = self._staging.bytes_object(path, 0, state.st_size)
        else:
            content = read_source_file(path, size_bytes_max=INLINE_BYTES_MAX)
        return SourceFile(path=self._relative(path), executable=bool(state.st_mode & 0o100), content=content)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._checkpoint.found.folder).as_posix()


def _as_slice(tensor: GatheredSource) -> SliceSource:
    return SliceSource(
        name=tensor.supplier,
        state="",
        dtype=tensor.dtype,
        elements=tensor.elements,
        path=tensor.file,
        offset_bytes=tensor.offset_bytes,
    )


def _owner(path: Path, world_size: int) -> int:
    rank = rank_of_file(path.name)
    return rank if rank is not None and rank < world_size else 0


class _ThreadReaders:
    """Two readers per thread, for the slices and for the gathered weights beside them; closed together."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[SourceReader] = []

    @property
    def slices(self) -> SourceReader:
        return self._mine("slices")

    @property
    def gathered(self) -> SourceReader:
        return self._mine("gathered")

    def _mine(self, name: str) -> SourceReader:
        reader: SourceReader | None = getattr(self._local, name, None)
        if reader is None:
            reader = SourceReader()
            self._all.append(reader)
            setattr(self._local, name, reader)
        return reader

    def __enter__(self) -> "_ThreadReaders":
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._all:
            reader.close()


def _run_all(pool: ThreadPoolExecutor, work: Callable[[Item], Result], items: list[Item]) -> list[Result]:
    """Return the results in order; after the first error nothing more is begun."""
    futures = [pool.submit(work, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
