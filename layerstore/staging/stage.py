"""
Staging: put objects, version blobs and ranks' states into the store before anything references them.

A reader supplies the bytes: from the files of a checkpoint, or from the memory of a running engine.
"""

import contextlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from layerstore.coding import Error
from layerstore.dtypes import by_code
from layerstore.errors import Overtaken, SourceCheckpoint, Unsupported
from layerstore.format import encode_blob, ref_of
from layerstore.framing import Frame, frame
from layerstore.hashing import ObjectHasher, combine_crc32, crc32
from layerstore.limits import BLOB_BYTES_MAX, INLINE_BYTES_MAX, SMALL_OBJECT_BYTES, SOURCE_CHUNK_BYTES
from layerstore.model import (
    BlobRef,
    CodingLoss,
    ObjectId,
    StoredObject,
    StoredTensor,
)
from layerstore.source import OpenedSource, open_source
from layerstore.staging.encode import Compact, ObjectEncoding, stored_tensor
from layerstore.states import GatheredFile, ObjectContent, RankState, SourceFile
from layerstore.storage import ObjectWriter
from layerstore.tree import Located, Tensor, replace_tensors
from layerstore.zero3 import ObjectSource, SliceSource

# Keep few files open: a checkpoint of a thousand ranks must not exhaust the descriptors.
_OPEN_FILES_MAX = 8

# Buffers per call of `preadv`: below any system's limit.
_READ_TOGETHER_MAX = 64

# The tensor's name in an object that holds a file or a storage; such an object has only this tensor.
_BYTES_KEY = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The content of a commit, apart from its position in the run."""

    versions: dict[str, BlobRef]
    """The version of every layer that was due."""
    states: tuple[BlobRef, ...]
    """The ranks' states, by rank."""
    bytes_derived: int
    """Gathered weights that were not stored because they follow from the masters."""
    has_moments: bool
    notes: tuple[str, ...] = ()
    """Notes for the user on what was left out."""
    losses: tuple[CodingLoss, ...] = ()
    """The coding errors of compact layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFile:
    """A file that is kept byte for byte with a rank's state."""

    name: str
    """The path below the checkpoint folder, with ``/``."""
    executable: bool
    place: Path
    """The path from which the reader reads the bytes."""
    size_bytes: int


ReadTarget = tuple[Path, int, memoryview]
"""A file of a source, an offset in it, and the buffer for the bytes there."""


class Reader(Protocol):
    """Reads a source: files, or the memory of a running engine."""

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of *path* in order; each chunk is valid until the next one is asked for."""

    def read_into(self, places: Sequence[ReadTarget]) -> None:
        """Fill each buffer with the bytes at its file and offset."""
        for path, offset, buffer in places:
            filled = 0
            for chunk in self.chunks(path, offset, len(buffer)):
                buffer[filled : filled + len(chunk)] = chunk
                filled += len(chunk)


class SourceReader(Reader):
    """Reads the files of a source, and keeps a few of them open; each thread has its own open files."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._stacks: list[contextlib.ExitStack] = []

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of *path* in order; each chunk is valid until the next one is asked for."""
        file, buffer = self._file(path), self._local.buffer
        end = offset + size_bytes
        while offset < end:
            chunk = buffer[: min(SOURCE_CHUNK_BYTES, end - offset)]
            file.read_into(chunk, offset)
            yield chunk
            offset += len(chunk)

    def read_into(self, places: Sequence[ReadTarget]) -> None:
        """Fill each buffer with the bytes at its file and offset; adjacent stretches are read in one call."""
        together: list[memoryview] = []
        before, begin, end = None, 0, 0
        # Almost always, one file has all the stretches: so sort by offset alone, and compare paths by identity.
        for path, offset, buffer in sorted(places, key=itemgetter(1)):
            if before is not None and (offset != end or path is not before or len(together) == _READ_TOGETHER_MAX):
                self._file(before).read_each(together, begin)
                together = []
            if not together:
                before, begin = path, offset
            together.append(buffer)
            end = offset + buffer.nbytes
        if before is not None:
            self._file(before).read_each(together, begin)

    def _file(self, path: Path) -> OpenedSource:
        if not hasattr(self._local, "files"):
            self._local.files, self._local.buffer = {}, memoryview(bytearray(SOURCE_CHUNK_BYTES))
        files: dict[Path, tuple[OpenedSource, contextlib.ExitStack]] = self._local.files
        known = files.get(path)
        if known is None:
            if len(files) == _OPEN_FILES_MAX:
                files.pop(next(iter(files)))[1].close()  # the file that was opened first
            stack = contextlib.ExitStack()
            known = files[path] = stack.enter_context(open_source(path)), stack
            self._stacks.append(stack)
        return known[0]

    def close(self) -> None:
        """Close the files of all threads."""
        for stack in self._stacks:
            stack.close()


class Checksums:
    """The CRC32 of every stretch of the source that was read, by file and offset; shared by threads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.known: dict[Path, dict[int, tuple[int, int]]] = {}
        """The size and checksum of every stretch, by file and offset."""

    def note(self, path: Path, offset: int, size_bytes: int, checksum: int) -> None:
        """Remember the checksum of one stretch."""
        with self._guard:
            self.known.setdefault(path, {})[offset] = (size_bytes, checksum)

    def note_slices(self, slices: Sequence[SliceSource], tensors: Sequence[StoredTensor]) -> None:
        """Remember the checksums of *slices*, which became *tensors*."""
        with self._guard:
            path, known = None, {}
            for part, tensor in zip(slices, tensors, strict=True):
                if part.path is not path:  # the slices are mostly of one file
                    path = part.path
                    known = self.known.setdefault(path, {})
                known[part.offset_bytes] = part.elements * by_code(part.dtype).bytes, tensor.crc32

    def join(self, known: Mapping[Path, Mapping[int, tuple[int, int]]]) -> None:
        """Add the stretches that another process has read."""
        for path, stretches in known.items():
            self.known.setdefault(path, {}).update(stretches)

    def check(self, storages: Sequence[tuple[str, Located]], reader: SourceReader) -> None:
        """
        Check every storage's bytes against the checksum in its file.

        Bytes that no slice covered (padding, scalars) are read now.

        Raises:
            SourceCheckpoint: A byte has changed since it was written.
        """
        starts = {path: sorted(known) for path, known in self.known.items()}
        for key, located in storages:
            actual = combine_crc32(self._parts(located, starts.get(located.path, []), reader))
            if actual != located.crc32:
                raise SourceCheckpoint(
                    f"{located.path} is damaged: entry {key} has checksum {actual:08x}, "
                    f"expected {located.crc32:08x}; nothing was ingested",
                    hint="copy the file again, or ingest another checkpoint",
                    path=str(located.path),
                    entry=key,
                )

    def _parts(self, located: Located, starts: list[int], reader: SourceReader) -> Iterator[tuple[int, int]]:
        """Yield checksum and size of the stretches that make up *located*; *starts* are known offsets in its file."""
        path, position = located.path, located.offset_bytes
        end = position + located.size_bytes
        for offset in starts[bisect_left(starts, position) : bisect_left(starts, end)]:
            length, checksum = self.known[path][offset]
            if offset < position or offset + length > end:
                continue  # it overlaps a stretch already yielded, or ends outside the storage
            if offset > position:
                yield crc32_of(reader, path, position, offset - position)
            yield checksum, length
            position = offset + length
        if position < end:
            yield crc32_of(reader, path, position, end - position)


def crc32_of(reader: SourceReader, path: Path, offset: int, size_bytes: int) -> tuple[int, int]:
    """Return the checksum of a stretch of *path*, and its size."""
    checksum = 0
    for chunk in reader.chunks(path, offset, size_bytes):
        checksum = crc32(chunk, checksum)
    return checksum, size_bytes


Witness = Callable[[SliceSource, int, memoryview], None]
"""Called for every chunk read, with the slice, the index of the chunk's first element, and the chunk's bytes."""


@dataclass(frozen=True, slots=True)
class _Inspected:
    """The object made up of slices that were read once."""

    ref: BlobRef
    tensors: tuple[StoredTensor, ...]
    chunks: bytes


class Staging:
    """Puts one checkpoint into a store."""

    def __init__(
        self,
        writer: ObjectWriter,
        reader: Reader,
        *,
        source: str,
        checksums: Checksums,
        advance: Callable[[int], None] = lambda count: None,
        known_before: bool = False,
        reads_once: bool = False,
    ) -> None:
        """
        *source* is the checkpoint's name in errors.

        With *known_before*, look objects up before writing them. *reads_once* means that the source can be read only
        once.
        """
        self._writer = writer
        self._reader = reader
        self._source = source
        self._checksums = checksums
        self._advance = advance
        self._known_before = known_before
        self._reads_once = reads_once
        self._likely_known: dict[str, bool] = {}
        self.losses: dict[ObjectId, dict[str, Error]] = {}
        """The coding errors of compact objects, by optimizer state."""
        self._local = threading.local()

    def object(self, source: ObjectSource, witness: Witness | None = None) -> StoredObject:
        """Stage the slices of *source*."""
        staged = self._staged(source.kind, source.slices, witness)
        return StoredObject(
            id=staged.ref.id,
            size_bytes=staged.ref.size_bytes,
            kind=source.kind,
            shard=source.shard,
            shards=source.shards,
            tensors=staged.tensors,
            chunks=staged.chunks,
        )

    def planned(self, source: ObjectSource, how: Compact | None, witness: Witness | None = None) -> StoredObject:
        """Stage the slices of *source*, compactly unless *how* is None."""
        return self.object(source, witness) if how is None else self.compact(source, how, witness)

    def compact(self, source: ObjectSource, how: Compact, witness: Witness | None = None) -> StoredObject:
        """Stage the slices of *source* in coded form, and claim the object that they refer to."""
        with closing(ObjectEncoding(source, how, self._writer.store)) as encoding, ExitStack() as stack:
            if encoding.reference is not None and not self._writer.refer(encoding.reference.ref):
                raise Overtaken(
                    f"object {encoding.reference.id}, which a compact save refers to, is gone; nothing was saved",
                    hint="repeat the command",
                )
            hasher, small = ObjectHasher(), bytearray()
            is_small = encoding.size_bytes <= SMALL_OBJECT_BYTES
            draft = None if is_small else stack.enter_context(self._writer.draft())
            for data in self._encoded(encoding, source, witness):
                if draft is None:
                    small += data
                else:
                    draft.write_at(hasher.size_bytes, data)
                hasher.update(data)
            ref = BlobRef(id=hasher.id(), size_bytes=hasher.size_bytes)
            stored = encoding.stored(source, ref, hasher.chunks())
            if draft is None:
                self._writer.put(small, ref)
            else:
                self._writer.keep(draft, ref)
            self.losses[ref.id] = encoding.losses
            return stored

    def _encoded(
        self, encoding: ObjectEncoding, source: ObjectSource, witness: Witness | None
    ) -> Iterator[bytes | memoryview]:
        yield encoding.header
        for number, part in enumerate(source.slices):
            yield from encoding.slice(number, self._witnessed(part, witness))

    def _witnessed(self, part: SliceSource, witness: Witness | None) -> Iterator[memoryview]:
        """Yield the bytes of *part* as they are read, and note their checksum."""
        checksum, start = 0, 0
        for chunk in self._reader.chunks(part.path, part.offset_bytes, part.size_bytes):
            checksum = crc32(chunk, checksum)
            if witness is not None:
                witness(part, start, chunk)
            start += len(chunk) // by_code(part.dtype).bytes
            yield chunk
            self._advance(len(chunk))
        self._checksums.note(part.path, part.offset_bytes, part.size_bytes, checksum)

    def bytes_object(self, path: Path, offset: int, size_bytes: int) -> ObjectContent:
        """Stage a stretch of *path* as an object of its own."""
        part = SliceSource(name=_BYTES_KEY, state="", dtype="U8", elements=size_bytes, path=path, offset_bytes=offset)
        staged = self._staged(_BYTES_KEY, (part,) if size_bytes else ())
        checksum = staged.tensors[0].crc32 if staged.tensors else 0
        return ObjectContent(object=staged.ref, size_bytes=size_bytes, crc32=checksum)

    def state(self, state: RankState, files: Iterable[KeptFile], gathered: Iterable[GatheredFile] = ()) -> BlobRef:
        """Stage a rank's *state* with its *files* and the bytes that its trees refer to."""
        kept = tuple(
            SourceFile(
                path=file.name, executable=file.executable, content=self.content_at(file.place, 0, file.size_bytes)
            )
            for file in files
        )
        return self.whole_state(replace(state, files=kept, gathered=tuple(gathered)))

    def whole_state(self, state: RankState) -> BlobRef:
        """Stage a rank's *state*, which already lists its files, with the bytes that its trees refer to."""
        for file in (state.model, state.optimizer):
            replace_tensors(file.tree, self._with_bytes)
        data = encode_blob(state)
        if len(data) > BLOB_BYTES_MAX:
            raise Unsupported(
                f"{self._source}: all that is not a layer takes {len(data)} bytes in small pieces, "
                f"at most {BLOB_BYTES_MAX} are supported",
                hint="keep fewer small files, and less in client_state",
            )
        ref = ref_of(data)
        self._writer.put(data, ref)
        return ref

    def _with_bytes(self, tensor: Tensor) -> Tensor:
        """Replace the position of a tensor's bytes with the bytes, or with an object that holds them."""
        located = tensor.storage.content
        if isinstance(located, Located):
            tensor.storage.content = self.content_at(located.path, located.offset_bytes, located.size_bytes)
        return tensor

    def content_at(self, path: Path, offset: int, size_bytes: int) -> bytes | ObjectContent:
        """Return a stretch of *path*, or stage it as an object if it is large."""
        if not size_bytes:
            return b""  # under stage 3, all weights in the model's file are empty
        if size_bytes > INLINE_BYTES_MAX:
            return self.bytes_object(path, offset, size_bytes)
        data = b"".join(map(bytes, self._reader.chunks(path, offset, size_bytes)))
        self._checksums.note(path, offset, len(data), crc32(data))
        return data

    def _staged(self, kind: str, slices: tuple[SliceSource, ...], witness: Witness | None = None) -> _Inspected:
        """
        Stage the object of *slices*, unless the store has it.

        An object's name is known only after all of its bytes were read. Small objects stay in memory until then. A
        large object is written as it is read if it is likely to be new. If it is likely to be in the store, it is only
        read; if it must be written after all, it is read again, usually from the page cache.
        """
        framing = frame(slices)
        if framing.size_bytes <= SMALL_OBJECT_BYTES:
            return self._staged_at_once(framing, slices, witness)
        if not self._reads_once and self._likely_known.get(kind, self._known_before):
            inspected = self._inspect(slices, witness)
            # If the guess was wrong, the source is read again; if the hash now differs, the source has changed.
            is_known = self._writer.spares_writing(inspected.ref)
            if not is_known:
                self._writer.stage(inspected.ref, self._content(slices))
        else:
            with self._writer.draft() as draft:
                inspected = self._inspect(slices, witness, write=draft.write_at)
                is_known = not self._writer.keep(draft, inspected.ref)
        # Frozen layers are mixed with others: the last object of a kind is the best guess for the next of that kind.
        self._likely_known[kind] = is_known
        return inspected

    def _staged_at_once(self, framing: Frame, slices: tuple[SliceSource, ...], witness: Witness | None) -> _Inspected:
        """Stage a small object from one buffer."""
        if not hasattr(self._local, "memory"):
            self._local.memory = memoryview(bytearray(SMALL_OBJECT_BYTES))
        # Each thread reuses one buffer for all of its objects: `put` no longer needs the bytes once it returns.
        data: memoryview = self._local.memory[: framing.size_bytes]
        data[: len(framing.header)] = framing.header
        places = [
            (part.path, part.offset_bytes, data[start:end])
            for part, start, end in zip(slices, framing.offsets, (*framing.offsets[1:], len(data)), strict=False)
        ]
        self._reader.read_into(places)
        if witness is not None:
            for part, (_, _, stretch) in zip(slices, places, strict=True):
                witness(part, 0, stretch)
        tensors = [stored_tensor(part, crc32(stretch)) for part, (_, _, stretch) in zip(slices, places, strict=True)]
        self._checksums.note_slices(slices, tensors)
        self._advance(framing.size_bytes - len(framing.header))
        hasher = ObjectHasher()
        hasher.update(data)
        ref = BlobRef(id=hasher.id(), size_bytes=hasher.size_bytes)
        self._writer.put(data, ref)
        return _Inspected(ref, tuple(tensors), hasher.chunks())

    def _inspect(
        self,
        slices: tuple[SliceSource, ...],
        witness: Witness | None,
        write: Callable[[int, bytes | memoryview], None] | None = None,
    ) -> _Inspected:
        """Read *slices*, which are in canonical order; *write* gets all bytes of the object, each with its offset."""
        header = frame(slices).header
        hasher = ObjectHasher()
        if write is not None:
            write(0, header)
        hasher.update(header)
        tensors = []
        for part in slices:
            checksum, start = 0, 0
            for chunk in self._reader.chunks(part.path, part.offset_bytes, part.size_bytes):
                if write is not None:
                    write(hasher.size_bytes, chunk)
                hasher.update(chunk)
                checksum = crc32(chunk, checksum)
                if witness is not None:
                    witness(part, start, chunk)
                start += len(chunk) // by_code(part.dtype).bytes
                self._advance(len(chunk))
            tensors.append(stored_tensor(part, checksum))
        self._checksums.note_slices(slices, tensors)
        ref = BlobRef(id=hasher.id(), size_bytes=hasher.size_bytes)
        return _Inspected(ref, tuple(tensors), hasher.chunks())

    def _content(self, slices: tuple[SliceSource, ...]) -> Iterator[bytes | memoryview]:
        yield frame(slices).header
        for part in slices:
            yield from self._reader.chunks(part.path, part.offset_bytes, part.size_bytes)
