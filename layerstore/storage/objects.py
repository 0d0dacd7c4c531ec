"""
Content-addressed object files: (id, bytes) <-> a durable file.

May not import lmdb, decide what is garbage, or know what a tensor is.
Layout and write order: docs/reference/format.md, sections 3 and 6.
"""

import errno as errnos
import mmap
from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from layerstore.errors import DAMAGED_HINT, IntegrityError, StorageIO
from layerstore.format import NameHasher
from layerstore.layout import OBJECT_ID, Layout
from layerstore.limits import BLOB_BYTES_MAX, IO_CHUNK_BYTES, WORKERS_MAX
from layerstore.model import BlobRef, ObjectId, StoredObject
from layerstore.storage.files import Files
from layerstore.storage.handles import OpenFile

Stretch = tuple[int, int]
"""Where bytes of an object begin and end."""


def read_chunks(file: OpenFile, start: int = 0, size_bytes: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of *file*, or a stretch of them, in order; each chunk is valid until the next is asked for."""
    end = file.size_bytes if size_bytes is None else start + size_bytes
    buffer = memoryview(bytearray(min(IO_CHUNK_BYTES, max(end - start, 1))))
    for offset in range(start, end, len(buffer)):
        chunk = buffer[: min(len(buffer), end - offset)]
        file.read_into(chunk, offset)
        yield chunk


def hashed(file: OpenFile) -> NameHasher:
    """Read all of *file*; return what it is called."""
    hasher = NameHasher()
    for data in read_chunks(file):
        hasher.update(data)
    return hasher


def check_hash(ref: BlobRef, hasher: NameHasher) -> None:
    """Raise IntegrityError unless what *hasher* saw is *ref*."""
    if hasher.id() != ref.id or hasher.size_bytes != ref.size_bytes:
        raise IntegrityError(
            f"object {ref.id} is damaged: its bytes hash to {hasher.id()}", hint=DAMAGED_HINT, object_id=ref.id
        )


def check_size(ref: BlobRef, size_bytes: int, path: Path) -> None:
    """Raise IntegrityError unless *path*, which has *size_bytes*, can be *ref*."""
    if size_bytes != ref.size_bytes:
        raise IntegrityError(
            f"object {ref.id} is damaged: {path} has {size_bytes} bytes, expected {ref.size_bytes}",
            hint=DAMAGED_HINT,
            object_id=ref.id,
            expected=ref.size_bytes,
            actual=size_bytes,
        )


def _missing(ref: BlobRef) -> IntegrityError:
    """Return the error for an object that is nowhere."""
    return IntegrityError(
        f"object {ref.id} ({ref.size_bytes} bytes) is missing",
        hint="ingest the same checkpoint again, or look at layerstore verify",
        object_id=ref.id,
    )


class ObjectStore:
    """The folder ``objects/``."""

    def __init__(self, layout: Layout, files: Files) -> None:
        self._layout = layout
        self._files = files

    # -- finding and reading -------------------------------------------------------------------------------------

    def find(self, ref: BlobRef) -> Path | None:
        """
        Return where *ref* is, which must be there; None if it is nowhere.

        A collection may have moved it aside for a moment: then it is found there. What another host has written may be
        seen late: then it is waited for.

        Raises:
            IntegrityError: Something of another size lies under its name.
        """
        return self._found(ref, self.places(ref.id))

    def find_at_once(self, ref: BlobRef) -> Path | None:
        """Return where *ref* is seen now, None if nowhere; raises as `find` does."""
        return self._found(ref, self._places_now(ref.id))

    def _found(self, ref: BlobRef, places: Iterable[Path]) -> Path | None:
        for path in places:
            size_bytes = self._files.size(path)
            if size_bytes is not None:
                check_size(ref, size_bytes, path)
                return path
        return None

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless *ref* is at its place or aside, in full size."""
        if self.find(ref) is None:
            raise _missing(ref)

    def places(self, object_id: ObjectId) -> Iterator[Path]:
        """Yield where an object may be, again and again while it may be seen late."""
        yield from self._places_now(object_id)
        for _ in self._files.again(self._layout.object(object_id)):
            yield from self._places_now(object_id)

    def _places_now(self, object_id: ObjectId) -> Iterator[Path]:
        """Yield where an object may be: at home, aside, and at home again."""
        home = self._layout.object(object_id)
        yield home
        yield self._layout.aside / object_id
        # Linked back meanwhile.
        yield home

    def expect(self, refs: Iterable[BlobRef]) -> None:
        """Note that *refs* will soon be opened, in their order: where they come from afar, they set out now."""

    def know(self, objects: Iterable[StoredObject]) -> None:
        """Note what a version says of *objects*: of what comes from afar, a stretch can be verified then."""

    def close(self) -> None:
        """Give up what is on its way."""

    def open(self, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        """
        Open *ref* for reading; only its size has been verified. Only *stretches* of it are needed, or all.

        Raises:
            IntegrityError: It is missing, of another size, or not a regular file.
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
        """Return the bytes of the small object *ref*, not yet verified: decoding a blob does that."""
        if ref.size_bytes > BLOB_BYTES_MAX:
            raise IntegrityError(f"object {ref.id} has {ref.size_bytes} bytes, too many for a blob")
        with self.open(ref) as file:
            return file.read_at(0, file.size_bytes)

    def verify(self, ref: BlobRef) -> None:
        """
        Read all of *ref* and compare its hash with its name.

        Raises:
            IntegrityError: A byte differs, or the object is missing or cut short.
        """
        with self.open(ref) as file:
            check_hash(ref, hashed(file))

    def verify_all(self, stretches: Mapping[BlobRef, Iterable[Stretch]]) -> set[BlobRef]:
        """Verify some objects, of which *stretches* are needed, several at a time; return those that are whole."""
        with ThreadPoolExecutor(WORKERS_MAX, thread_name_prefix="verify") as pool:
            for _ in pool.map(self.verify, stretches):
                pass  # raises where one is damaged
        return set(stretches)

    def is_sound(self, path: Path, ref: BlobRef) -> bool:
        """Whether *path* is a file with the very bytes of *ref*; it is read."""
        return self.is_whole(path, ref.id) and self._files.size(path) == ref.size_bytes

    def is_whole(self, path: Path, object_id: ObjectId) -> bool:
        """Whether *path* is a file whose bytes are what the name *object_id* says, however many; it is read."""
        try:
            with self._files.open(path) as file:
                return hashed(file).id() == object_id
        except IntegrityError:
            return False
        except StorageIO as exc:
            if exc.errno not in {errnos.ENOENT, errnos.EIO}:
                raise  # too few descriptors, no permission: that proves nothing about the bytes
            return False

    def map(self, ref: BlobRef, *, verify: bool) -> mmap.mmap:
        """
        Return the bytes of *ref* as read-only memory, which stays when the object is removed.

        With *verify* the mapped file is read and hashed first.

        Raises:
            IntegrityError: A byte differs, or the object is missing or cut short.
        """
        with self.open(ref) as file:
            if verify:
                check_hash(ref, hashed(file))
            return file.map()

    def on_disk(self, object_id: ObjectId) -> tuple[Hashable, int] | None:
        """Return which file an object at its place is, and the bytes that it takes there; None if it is gone."""
        return self._files.on_disk(self._layout.object(object_id))

    def ids(self) -> Iterator[ObjectId]:
        """Yield every object at its place, by id."""
        for prefix in self._files.names(self._layout.objects):
            yield from self.ids_in(prefix)

    def ids_in(self, prefix: str) -> list[ObjectId]:
        """Return the objects at their places whose ids begin with the two digits *prefix*, by id."""
        folder = self._layout.objects / prefix
        names = self._files.names_in_folder(folder)
        return [ObjectId(name) for name in names if OBJECT_ID.fullmatch(name) and name[:2] == prefix]
