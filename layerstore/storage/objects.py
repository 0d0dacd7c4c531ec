"""
Content-addressed object files: (id, bytes) <-> a durable file.

This module may not import lmdb, decide what is garbage, or know what a tensor is.
Layout and write order: docs/reference/format.md, sections 3 and 6.
"""

import errno as errnos
import mmap
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from layerstore.disk import Files, OpenFile
from layerstore.errors import DAMAGED_HINT, IntegrityError, StorageIO
from layerstore.hashing import NameHasher
from layerstore.layout import OBJECT_ID, Layout
from layerstore.limits import BLOB_BYTES_MAX, IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, ObjectId, StoredObject
from layerstore.threads import Threads

Stretch = tuple[int, int]
"""A stretch of an object: start and end."""


def read_chunks(file: OpenFile, start: int = 0, size_bytes: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of *file*, or a stretch of them, in order; a chunk is valid until the next one is requested."""
    end = file.size_bytes if size_bytes is None else start + size_bytes
    # At least one byte, because the buffer's length is the step of the range below, which must not be 0.
    buffer = memoryview(bytearray(min(IO_CHUNK_BYTES, max(end - start, 1))))
    for offset in range(start, end, len(buffer)):
        chunk = buffer[: min(len(buffer), end - offset)]
        file.read_into(chunk, offset)
        yield chunk


def hashed(file: OpenFile) -> NameHasher:
    """Read all of *file*; return the hasher that gives its name."""
    hasher = NameHasher()
    _hash_until(file.size_bytes, file, hasher)
    return hasher


def _hash_until(end: int, file: OpenFile, hasher: NameHasher) -> None:
    """Feed *file* to *hasher*, from where it stopped, up to *end*."""
    if hasher.size_bytes < end:
        for data in read_chunks(file, hasher.size_bytes, end - hasher.size_bytes):
            hasher.update(data)


def check_hash(ref: BlobRef, hasher: NameHasher) -> None:
    """Raise IntegrityError unless the bytes that *hasher* saw match *ref*."""
    if hasher.id() != ref.id or hasher.size_bytes != ref.size_bytes:
        raise IntegrityError(
            f"object {ref.id} is damaged: its bytes hash to {hasher.id()}", hint=DAMAGED_HINT, object_id=ref.id
        )


def check_size(ref: BlobRef, size_bytes: int, path: Path) -> None:
    """Raise IntegrityError unless *size_bytes*, the size of *path*, matches *ref*."""
    if size_bytes != ref.size_bytes:
        raise IntegrityError(
            f"object {ref.id} is damaged: {path} has {size_bytes} bytes, expected {ref.size_bytes}",
            hint=DAMAGED_HINT,
            object_id=ref.id,
            expected=ref.size_bytes,
            actual=size_bytes,
        )


class Hashing:
    """Hashes objects while they are read, so that verifying and using an object takes one read."""

    def __init__(self, refs: Iterable[BlobRef]) -> None:
        """Prepare to hash *refs*; other objects are only read."""
        self._hashers = {ref: NameHasher() for ref in refs}

    @property
    def refs(self) -> Set[BlobRef]:
        """The objects that this hashes."""
        return self._hashers.keys()

    def read_into(self, ref: BlobRef, file: OpenFile, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* from *offset* of *file*, the object *ref*; reading out of order reads some bytes twice."""
        hasher = self._hashers.get(ref)
        if hasher is not None:
            _hash_until(offset, file, hasher)
        file.read_into(buffer, offset)
        if hasher is not None and hasher.size_bytes == offset:
            hasher.update(buffer)

    def check(self, objects: "ObjectStore") -> None:
        """Read the rest of the objects; raise IntegrityError if one is damaged."""
        for ref, hasher in self._hashers.items():
            if hasher.size_bytes < ref.size_bytes:
                with objects.open(ref) as file:
                    _hash_until(ref.size_bytes, file, hasher)
            check_hash(ref, hasher)


def _missing(ref: BlobRef) -> IntegrityError:
    return IntegrityError(
        f"object {ref.id} ({ref.size_bytes} bytes) is missing",
        hint="ingest the same checkpoint again; layerstore verify lists what is affected",
        object_id=ref.id,
        is_missing=True,
    )


class ObjectStore:
    """The folder ``objects/``."""

    def __init__(self, layout: Layout, files: Files) -> None:
        self._layout = layout
        self._files = files

    # -- finding and reading -------------------------------------------------------------------------------------

    def find(self, ref: BlobRef) -> Path | None:
        """
        Return the path of *ref*, which ought to exist; None if it is missing.

        A collection may have moved the object to ``gc/aside/`` for a moment, so this looks in that folder too. A file
        that another host has written may become visible late, so this waits for it.

        Raises:
            IntegrityError: The object's file has the wrong size.
        """
        return self._first_present(ref, self.places(ref.id))

    def find_at_once(self, ref: BlobRef) -> Path | None:
        """Return the path of *ref* without waiting; None if it is not visible now; raises as `find` does."""
        return self._first_present(ref, self._places_now(ref.id))

    def is_there(self, ref: BlobRef) -> bool:
        """Whether a file has the name of *ref* now, even if it is damaged."""
        try:
            return self.find_at_once(ref) is not None
        except IntegrityError:  # of the wrong size, or not a file
            return True

    def _first_present(self, ref: BlobRef, places: Iterable[Path]) -> Path | None:
        for path in places:
            size_bytes = self._files.size(path)
            if size_bytes is not None:
                check_size(ref, size_bytes, path)
                return path
        return None

    def look_anew(self) -> None:
        """Prepare for many calls of `check_there`: a local store does nothing, a remote forgets its older listings."""

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless *ref* is in ``objects/`` or aside, with its full size."""
        if self.find(ref) is None:
            raise _missing(ref)

    def places(self, object_id: ObjectId) -> Iterator[Path]:
        """Yield the possible paths of an object, repeatedly for as long as it may become visible late."""
        yield from self._places_now(object_id)
        for _ in self._files.again(self._layout.object(object_id)):
            yield from self._places_now(object_id)

    def _places_now(self, object_id: ObjectId) -> Iterator[Path]:
        """Yield the possible paths of an object: in ``objects/``, aside, and in ``objects/`` again."""
        home = self._layout.object(object_id)
        yield home
        yield self._layout.aside / object_id
        # In case the object was linked back in between.
        yield home

    @contextmanager
    def expected(self, refs: Iterable[BlobRef]) -> Iterator["ObjectStore"]:  # for remotes
        """Yield a store for using *refs* once, in order: a remote fetches and verifies them ahead of the reader."""
        yield self

    def know(self, version: BlobRef, objects: Iterable[StoredObject]) -> None:
        """Take note of *objects* as *version* lists them: a remote can then verify stretches of them."""

    def close(self) -> None:
        """Do nothing in a local store; a remote cancels its pending downloads."""

    def open(self, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        """
        Open *ref* for reading *stretches* of it, or all of it; verifies only its size.

        Raises:
            IntegrityError: *ref* is missing, has the wrong size, or is not a regular file.
        """
        for path in self.places(ref.id):
            try:
                file = self._files.open(path)
            except StorageIO as exc:
                if exc.errno == errnos.ENOENT:
                    continue
                raise
            if file.size_bytes != ref.size_bytes:
                file.close()
                check_size(ref, file.size_bytes, path)
            return file
        raise _missing(ref)

    def read(self, ref: BlobRef) -> bytes:
        """Return the bytes of the small object *ref*, unverified: decoding a blob verifies it."""
        if ref.size_bytes > BLOB_BYTES_MAX:
            raise IntegrityError(f"object {ref.id} has {ref.size_bytes} bytes, too many for a blob")
        with self.open(ref) as file:
            return file.read_at(0, file.size_bytes)

    def verify(self, ref: BlobRef) -> None:
        """Make sure that *ref*, which is about to be used, is present and sound; raises as `check_bytes` does."""
        self.check_bytes(ref)

    def check_bytes(self, ref: BlobRef) -> None:
        """
        Read all of *ref* as it is now, and compare its hash with its name.

        Raises:
            IntegrityError: A byte differs, or the object is missing or cut short.
        """
        with self.open(ref) as file:
            check_hash(ref, hashed(file))

    def verify_all(self, stretches: Mapping[BlobRef, Iterable[Stretch]]) -> set[BlobRef]:
        """Verify at least *stretches* of objects, several objects at a time; return the objects verified as a whole."""
        with Threads(WORKERS_MAX, thread_name_prefix="verify") as pool:
            for _ in pool.map(self.verify, stretches):
                pass  # raises if one is damaged
        return set(stretches)

    def is_sound(self, path: Path, ref: BlobRef) -> bool:
        """Whether *path* is a file with exactly the bytes of *ref*; reads the file."""
        return self.is_whole(path, ref.id) and self._files.size(path) == ref.size_bytes

    def is_whole(self, path: Path, object_id: ObjectId) -> bool:
        """Whether *path* is a file whose bytes, however many, hash to *object_id*; reads the file."""
        try:
            with self._files.open(path) as file:
                return hashed(file).id() == object_id
        except IntegrityError:
            return False  # a link, a folder or a fifo
        except StorageIO as exc:
            if exc.errno not in {errnos.ENOENT, errnos.EIO}:
                raise  # out of descriptors, or no permission: proves nothing about the bytes
            return False

    def map(self, ref: BlobRef, *, verify: bool) -> mmap.mmap:
        """
        Map the bytes of *ref* as read-only memory, which stays valid when the object is removed.

        With *verify*, the mapped file is read and hashed first.

        Raises:
            IntegrityError: A byte differs, or the object is missing or cut short.
        """
        with self.open(ref) as file:
            if verify:
                check_hash(ref, hashed(file))
            # Map the open file, not its name, so that the bytes mapped are those hashed.
            return file.map()

    def on_disk(self, object_id: ObjectId) -> tuple[Hashable, int] | None:
        """Return the identity of an object's file and the bytes that the file takes on disk; None if it is gone."""
        return self._files.on_disk(self._layout.object(object_id))

    def ids(self) -> Iterator[ObjectId]:
        """Yield every object in ``objects/``, in the order of ids."""
        for prefix in self._files.names(self._layout.objects):
            yield from self.ids_in(prefix)

    def ids_in(self, prefix: str) -> list[ObjectId]:
        """Return the objects in ``objects/`` whose ids start with the two digits *prefix*, in the order of ids."""
        folder = self._layout.objects / prefix
        names = self._files.names_in_folder(folder)
        return [ObjectId(name) for name in names if OBJECT_ID.fullmatch(name) and name[:2] == prefix]
