"""
Read a source's slices once: their checksums, their object's name, and whether gathered weights follow from them.

A source file is read, never mapped: its writer may truncate it meanwhile, which would kill us.
"""

import contextlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from layerstore.dtypes import by_code
from layerstore.errors import SourceCheckpoint
from layerstore.format.hashing import ObjectHasher, combine_crc32, crc32
from layerstore.format.objects import frame
from layerstore.limits import IO_CHUNK_BYTES
from layerstore.model import BlobRef, StoredTensor
from layerstore.zero3 import OpenedSource, SliceSource, StorageCheck, open_source

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

    def check(self, storages: Sequence[StorageCheck], reader: SourceReader) -> None:
        """
        Compare every storage's bytes with the checksum that its file states.

        What no slice covered (padding, scalars) is read now.

        Raises:
            SourceCheckpoint: A byte is not as it was written.
        """
        starts = {path: sorted(known) for path, known in self._known.items()}
        for storage in storages:
            located = storage.located
            parts = self._parts(located.path, located.offset_bytes, located.size_bytes, starts, reader)
            found = combine_crc32(parts)
            if found != located.crc32:
                raise SourceCheckpoint(
                    f"{located.path} is damaged: entry {storage.key} has checksum {found:08x}, "
                    f"expected {located.crc32:08x}; nothing was ingested",
                    hint="copy the file again, or ingest another checkpoint",
                    path=str(located.path),
                    entry=storage.key,
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
