"""
What is put into the store before anything names it: objects of slices, objects of bare bytes, and ranks' states.

Where the bytes come from is the reader's business: files of a checkpoint, or the memory of a running engine.
"""

import contextlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from layerstore.dtypes import by_code
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.format import ObjectHasher, combine_crc32, crc32, encode_state, encode_version, frame, ref_of
from layerstore.limits import BLOB_BYTES_MAX, INLINE_BYTES_MAX, IO_CHUNK_BYTES
from layerstore.model import (
    BlobRef,
    GatheredFile,
    Kind,
    LayerVersion,
    ObjectContent,
    RankState,
    SourceFile,
    StoredObject,
    StoredTensor,
)
from layerstore.storage import ObjectWriter
from layerstore.tree import Located, Storage, Tensor
from layerstore.zero3 import (
    BYTES_KEY,
    ObjectSource,
    OpenedSource,
    SliceSource,
    open_source,
    replace_tensors,
)

# Few files are read at a time; a checkpoint of a thousand ranks must not exhaust the descriptors.
_OPEN_FILES_MAX = 8


class Reader(Protocol):
    """What gives bytes of a source: of files, or of the memory of a running engine."""

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of *path* in order; each chunk is valid until the next one is asked for."""


class SourceReader:
    """Open files of a source, kept open while many slices of them are read; for one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[OpenedSource, contextlib.ExitStack]] = {}
        self._buffer = memoryview(bytearray(IO_CHUNK_BYTES))

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of *path* in order; each chunk is valid until the next one is asked for."""
        file = self._file(path)
        end = offset + size_bytes
        while offset < end:
            chunk = self._buffer[: min(IO_CHUNK_BYTES, end - offset)]
            file.read_into(chunk, offset)
            yield chunk
            offset += len(chunk)

    def _file(self, path: Path) -> OpenedSource:
        if path not in self._open:
            if len(self._open) == _OPEN_FILES_MAX:
                self._close(next(iter(self._open)))
            stack = contextlib.ExitStack()
            self._open[path] = stack.enter_context(open_source(path)), stack
        return self._open[path][0]

    def _close(self, path: Path) -> None:
        self._open.pop(path)[1].close()

    def close(self) -> None:
        """Close all files."""
        for path in list(self._open):
            self._close(path)


class Checksums:
    """The CRC32 of every stretch of the source that was read, by where it lies; shared by threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._known: dict[Path, dict[int, tuple[int, int]]] = {}

    def note(self, path: Path, offset: int, size_bytes: int, checksum: int) -> None:
        """Remember the checksum of one stretch."""
        with self._guard:
            self._known.setdefault(path, {})[offset] = (size_bytes, checksum)

    def check(self, storages: Sequence[tuple[str, Located]], reader: SourceReader) -> None:
        """
        Compare every storage's bytes with the checksum that its file states.

        What no slice covered (padding, scalars) is read now.

        Raises:
            SourceCheckpoint: A byte is not as it was written.
        """
        starts = {path: sorted(known) for path, known in self._known.items()}
        for key, located in storages:
            parts = self._parts(located.path, located.offset_bytes, located.size_bytes, starts, reader)
            found = combine_crc32(parts)
            if found != located.crc32:
                raise SourceCheckpoint(
                    f"{located.path} is damaged: entry {key} has checksum {found:08x}, "
                    f"expected {located.crc32:08x}; nothing was ingested",
                    hint="copy the file again, or ingest another checkpoint",
                    path=str(located.path),
                    entry=key,
                )

    def _parts(
        self, path: Path, start: int, size_bytes: int, starts: dict[Path, list[int]], reader: SourceReader
    ) -> Iterator[tuple[int, int]]:
        known, position, end = self._known.get(path, {}), start, start + size_bytes
        for offset in _within(starts.get(path, []), start, end):
            length, checksum = known[offset]
            if offset < position or offset + length > end:
                continue  # overlaps what was covered already: that stretch decides
            if offset > position:
                yield crc32_of(reader, path, position, offset - position)
            yield checksum, length
            position = offset + length
        if position < end:
            yield crc32_of(reader, path, position, end - position)


def _within(sorted_offsets: list[int], start: int, end: int) -> list[int]:
    return sorted_offsets[bisect_left(sorted_offsets, start) : bisect_left(sorted_offsets, end)]


def crc32_of(reader: SourceReader, path: Path, offset: int, size_bytes: int) -> tuple[int, int]:
    """Return the checksum of a stretch of *path*, and its size."""
    checksum = 0
    for chunk in reader.chunks(path, offset, size_bytes):
        checksum = crc32(chunk, checksum)
    return checksum, size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """Slices of the source that were read once: what an object of them is called, and how it lies."""

    slices: tuple[SliceSource, ...]
    header: bytes
    ref: BlobRef
    tensors: tuple[StoredTensor, ...]
    chunks: bytes

    def content(self, reader: Reader) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the object, from the source."""
        yield self.header
        for part in self.slices:
            yield from reader.chunks(part.path, part.offset_bytes, part.size_bytes)


Witness = Callable[[SliceSource, int, memoryview], None]
"""Sees bytes go by: the slice they are of, the element they start at, and the bytes."""


def inspect(
    slices: tuple[SliceSource, ...],
    reader: Reader,
    checksums: Checksums,
    *,
    witness: Witness | None = None,
    write: Callable[[int, bytes | memoryview], None] | None = None,
    advance: Callable[[int], None],
) -> Inspected:
    """
    Read *slices*, which are in canonical order, and return what their object is called in a store.

    *write* is given all of the object's bytes and where they go, in order.
    """
    header = frame(slices).header
    hasher = ObjectHasher()
    if write is not None:
        write(0, header)
    hasher.update(header)
    tensors = []
    for part in slices:
        checksum, start = 0, 0
        for chunk in reader.chunks(part.path, part.offset_bytes, part.size_bytes):
            if write is not None:
                write(hasher.size_bytes, chunk)
            hasher.update(chunk)
            checksum = crc32(chunk, checksum)
            if witness is not None:
                witness(part, start, chunk)
            start += len(chunk) // by_code(part.dtype).bytes
            advance(len(chunk))
        checksums.note(part.path, part.offset_bytes, part.size_bytes, checksum)
        tensors.append(_stored(part, checksum))
    return Inspected(
        slices=slices,
        header=header,
        ref=BlobRef(id=hasher.id(), size_bytes=hasher.size_bytes),
        tensors=tuple(tensors),
        chunks=hasher.chunks(),
    )


def _stored(part: SliceSource, checksum: int) -> StoredTensor:
    return StoredTensor(name=part.name, state=part.state, dtype=part.dtype, elements=part.elements, crc32=checksum)


_KINDS = tuple(Kind)


def in_order(objects: Iterable[StoredObject]) -> tuple[StoredObject, ...]:
    """Return the *objects* of a version in the order in which every version has them."""
    return tuple(sorted(objects, key=lambda of: (_KINDS.index(of.kind), of.shards, of.shard)))


class Staging:
    """One checkpoint's way into a store."""

    def __init__(
        self,
        writer: ObjectWriter,
        reader: Callable[[], Reader],
        *,
        source: str,
        checksums: Checksums,
        advance: Callable[[int], None],
        known_before: bool = False,
        reads_once: bool = False,
    ) -> None:
        """
        *reader* gives each thread its own; *source* names the checkpoint in errors.

        What is *known_before* is looked at before it is written; with *reads_once* nothing can be read a second time.
        """
        self._writer = writer
        self._reader = reader
        self._source = source
        self._checksums = checksums
        self._advance = advance
        self._known_before = known_before
        self._reads_once = reads_once
        self._likely_known: dict[str, bool] = {}

    def object(self, source: ObjectSource, witness: Witness | None = None) -> StoredObject:
        """Stage the slices of *source*."""
        found = self._staged(source.kind, source.slices, witness)
        return StoredObject(
            id=found.ref.id,
            size_bytes=found.ref.size_bytes,
            kind=source.kind,
            shard=source.shard,
            shards=source.shards,
            tensors=found.tensors,
            chunks=found.chunks,
        )

    def _staged(self, kind: str, slices: tuple[SliceSource, ...], witness: Witness | None = None) -> Inspected:
        """
        Stage the object of *slices*, unless the store has it.

        Which it is, is known once all bytes were seen. What is likely to be new is written as it is read;
        what is likely to be there is read first, and once more, most likely from memory, if it is not.
        """
        reader = self._reader()
        look = partial(inspect, slices, reader, self._checksums, witness=witness, advance=self._advance)
        if not self._reads_once and self._likely_known.get(kind, self._known_before):
            found = look()
            is_known = self._writer.spares_writing(found.ref)
            if not is_known:
                self._writer.stage(found.ref, found.content(reader))
        else:
            with self._writer.draft() as draft:
                found = look(write=draft.write_at)
                is_known = not draft.keep_as(found.ref)
        # Frozen layers lie among others: the latest of the same kind is the best guess for the next.
        self._likely_known[kind] = is_known
        return found

    def bytes_object(self, path: Path, offset: int, size_bytes: int) -> ObjectContent:
        """Stage a stretch of *path* as an object of its own."""
        part = SliceSource(name=BYTES_KEY, state="", dtype="U8", elements=size_bytes, path=path, offset_bytes=offset)
        found = self._staged(BYTES_KEY, (part,) if size_bytes else ())
        checksum = found.tensors[0].crc32 if found.tensors else 0
        return ObjectContent(object=found.ref, size_bytes=size_bytes, crc32=checksum)

    def version(self, version: LayerVersion) -> BlobRef:
        """Stage *version*, its objects brought into their order."""
        return self._blob(encode_version(replace(version, objects=in_order(version.objects))))

    def state(self, state: RankState, files: Iterable[SourceFile], gathered: Iterable[GatheredFile] = ()) -> BlobRef:
        """Stage a rank's *state*, complete with its *files*: the bytes that its trees only point at come with it."""
        for file in (state.model, state.optimizer):
            replace_tensors(file.tree, self._with_bytes)
        return self._blob(encode_state(replace(state, files=tuple(files), gathered=tuple(gathered))))

    def _with_bytes(self, tensor: Tensor) -> Tensor:
        """Exchange the place of a tensor's bytes for the bytes, or for an object that holds them."""
        located = tensor.storage.content
        if isinstance(located, Located):
            tensor.storage.content = self._stored_content(tensor.storage, located)
        return tensor

    def _stored_content(self, storage: Storage, located: Located) -> bytes | ObjectContent:
        if located.size_bytes > INLINE_BYTES_MAX:
            return self.bytes_object(located.path, located.offset_bytes, located.size_bytes)
        chunks = self._reader().chunks(located.path, located.offset_bytes, located.size_bytes)
        data = b"".join(map(bytes, chunks))
        self._checksums.note(located.path, located.offset_bytes, len(data), crc32(data))
        return data

    def _blob(self, data: bytes) -> BlobRef:
        if len(data) > BLOB_BYTES_MAX:
            raise Unsupported(
                f"{self._source}: what is not a layer takes {len(data)} bytes in small pieces, "
                f"at most {BLOB_BYTES_MAX} are supported",
                hint="are there thousands of small files in the checkpoint's folder that do not belong to it?",
            )
        ref = ref_of(data)
        self._writer.put(data, ref)
        return ref
