"""Stage the layers of a distributed checkpoint: however its tensors are chunked, the store gets slices."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from layerstore.distcp.read import FlatTensor
from layerstore.dtypes import by_code, dtype_name
from layerstore.errors import LayoutMismatch
from layerstore.hashing import crc32
from layerstore.limits import WORKERS_MAX
from layerstore.model import BlobRef, Kind, StoredObject
from layerstore.numbers import convert, equal_bytes
from layerstore.progress import Progress
from layerstore.staging import (
    NONE_COMPACT,
    Checksums,
    CompactLayers,
    Content,
    Reader,
    SourceReader,
    Staging,
    coding_losses,
    stage_version,
)
from layerstore.storage import ObjectWriter
from layerstore.threads import Threads, run_all
from layerstore.zero3 import Checkpoint, ObjectSource, check_unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor of the folder, and the element type in which the store keeps it."""

    tensor: FlatTensor
    dtype: str
    is_rounded: bool = False
    """Whether values that *dtype* cannot hold are rounded, as in buffers, instead of refused."""


Versions = Mapping[str, BlobRef]
StageStates = Callable[[Staging, ObjectWriter, Versions], tuple[tuple[BlobRef, ...], Sequence[str]]]
"""Stages everything that is not a layer; returns references to the states, and notes for the user."""


def stage(
    checkpoint: Checkpoint,
    wanted: Mapping[Path, Wanted],
    writer: ObjectWriter,
    progress: Progress,
    *,
    world_sizes: Mapping[str, int],
    stage_states: StageStates,
    due: Collection[str],
    known_before: bool,
    moments: bool = True,
    compact: CompactLayers = NONE_COMPACT,
) -> Content:
    """
    Stage the *due* layers of *checkpoint*, whose slices refer to *wanted* tensors, and everything else.

    *world_sizes* gives the number of slices per layer. Raises as `layerstore.ingest.transfer` does.
    """
    checksums = Checksums()
    layers = [layer for layer in checkpoint.layers if layer.layer in due]
    with closing(SourceReader()) as files, Threads(WORKERS_MAX) as pool:
        staging = Staging(
            writer,
            _TensorReader(wanted, files, checksums),
            source=str(checkpoint.found.folder),
            checksums=checksums,
            advance=progress.advance,
            known_before=known_before,
        )
        sources = [
            [source for source in layer.objects if moments or source.kind is not Kind.OPTIMIZER] for layer in layers
        ]
        progress.start(
            "ingest", sum(part.size_bytes for objects in sources for source in objects for part in source.slices)
        )
        staged = [
            run_all(pool, partial(_staged, staging, compact, layer.layer), objects)
            for layer, objects in zip(layers, sources, strict=True)
        ]
        versions = {
            layer.layer: stage_version(
                writer,
                layer,
                objects,
                world_size=world_sizes[layer.layer],
                references=compact.references(layer.layer),
            )
            for layer, objects in zip(layers, staged, strict=True)
        }
        # Before the checksums are checked, because staging the states reads files of the folder too.
        states, notes = stage_states(staging, writer, versions)
        checksums.check(checkpoint.checks, files)
    # Last: if a trainer wrote to the folder during the read, the layers could come from two saves.
    check_unchanged(checkpoint.found)
    return Content(
        versions=versions,
        states=states,
        bytes_derived=0,
        has_moments=moments,
        notes=tuple(notes),
        losses=tuple(
            loss
            for layer, objects in zip(layers, staged, strict=True)
            for loss in coding_losses(layer.layer, objects, staging)
        ),
    )


def _staged(staging: Staging, compact: CompactLayers, layer: str, source: ObjectSource) -> StoredObject:
    return staging.planned(source, compact.plan(layer, source))


class _TensorReader(Reader):
    """Reads the folder's files by their own paths, and its tensors, in the store's types, by the paths in slices."""

    def __init__(self, wanted: Mapping[Path, Wanted], files: SourceReader, checksums: Checksums) -> None:
        self._wanted = wanted
        self._files = files
        self._checksums = checksums

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of a tensor, or of a file, in order; each chunk is valid until the next one is requested."""
        wanted = self._wanted.get(path)
        if wanted is None:
            yield from self._files.chunks(path, offset, size_bytes)
            return
        item = by_code(wanted.dtype).bytes
        for run in wanted.tensor.stretch(offset // item, size_bytes // item):
            position = run.offset_bytes
            for data in self._files.chunks(run.path, position, run.elements * by_code(wanted.tensor.dtype).bytes):
                # Note the bytes as they are in the file: the folder's checksums cover these, not converted bytes.
                self._checksums.note(run.path, position, len(data), crc32(data))
                position += len(data)
                yield _exactly(wanted, data)


def _exactly(wanted: Wanted, data: memoryview) -> memoryview:
    """Return *data* in the store's type; raises LayoutMismatch if that changes values that may not be rounded."""
    kept_dtype, source_dtype = wanted.dtype, wanted.tensor.dtype
    if kept_dtype == source_dtype:
        return data
    # Converting back is the test: a value that the kept type cannot hold comes back different.
    converted = convert(data, source=source_dtype, target=kept_dtype)
    if not wanted.is_rounded and not equal_bytes(convert(converted, source=kept_dtype, target=source_dtype), data):
        raise LayoutMismatch(
            f"{wanted.tensor.key!r} has changed: it is not trained in the base, which keeps {dtype_name(kept_dtype)}, "
            f"and its values here need {dtype_name(source_dtype)}",
            hint="choose a base in which it is trained, or freeze it",
        )
    return converted
