"""
Content-addressed object files: (id, bytes) <-> a durable file.

May not import lmdb, decide what is garbage, or know what a tensor is.
Layout and write order: docs/reference/format.md, sections 3 and 6.
"""

import contextlib
import errno as errnos
import mmap
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerstore.errors import DAMAGED_HINT, IntegrityError, Overtaken, StorageIO
from layerstore.format import Bytes, NameHasher
from layerstore.layout import OBJECT_ID, Layout
from layerstore.limits import BLOB_BYTES_MAX, IO_CHUNK_BYTES
from layerstore.model import BlobRef, ObjectId
from layerstore.storage.files import Files
from layerstore.storage.handles import OpenFile, Stream


def read_chunks(file: OpenFile) -> Iterator[memoryview]:
    """Yield the bytes of *file* in order; each chunk is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(IO_CHUNK_BYTES, max(file.size_bytes, 1))))
    for offset in range(0, file.size_bytes, len(buffer)):
        chunk = buffer[: min(len(buffer), file.size_bytes - offset)]
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
        Return where *ref* is, None if it is nowhere.

        A collection may have moved it aside for a moment: then it is found there.

        Raises:
            IntegrityError: Something of another size lies under its name.
        """
        for path in self.places(ref.id):
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
        """Yield where an object may be: at home, aside, and at home again."""
        home = self._layout.object(object_id)
        yield home
        yield self._layout.aside / object_id
        # Linked back meanwhile.
        yield home

    def open(self, ref: BlobRef) -> OpenFile:
        """
        Open *ref* for reading; only its size has been verified.

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
        with self.open(ref) as file:
            if file.size_bytes > BLOB_BYTES_MAX:
                raise IntegrityError(f"object {ref.id} has {file.size_bytes} bytes, too many for a blob")
            return file.read_at(0, file.size_bytes)

    def verify(self, ref: BlobRef) -> None:
        """
        Read all of *ref* and compare its hash with its name.

        Raises:
            IntegrityError: A byte differs, or the object is missing or cut short.
        """
        with self.open(ref) as file:
            check_hash(ref, hashed(file))

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

    def ids(self) -> Iterator[ObjectId]:
        """Yield every object at its place, by id."""
        for prefix in self._files.names(self._layout.objects):
            yield from self.ids_in(prefix)

    def ids_in(self, prefix: str) -> list[ObjectId]:
        """Return the objects at their places whose ids begin with the two digits *prefix*, by id."""
        folder = self._layout.objects / prefix
        names = self._files.names_in_folder(folder)
        return [ObjectId(name) for name in names if OBJECT_ID.fullmatch(name) and name[:2] == prefix]


class ObjectWriter:
    """
    One commit's new objects: staged first, published together once their source has proven sound.

    Safe to use from several threads. *past_cache* is for bytes that nobody reads again soon.
    With *reads_reused*, objects that the store has already are read once and compared with their names.
    """

    def __init__(
        self, layout: Layout, files: Files, store: ObjectStore, *, past_cache: bool = False, reads_reused: bool = False
    ) -> None:
        self._layout = layout
        self._files = files
        self._store = store
        self._past_cache = past_cache
        self._reads_reused = reads_reused
        self._guard = threading.Lock()
        self._staged: dict[ObjectId, tuple[BlobRef, Path]] = {}
        self._damaged: dict[ObjectId, BlobRef] = {}
        self._reused: dict[ObjectId, BlobRef] = {}
        self._claimed: dict[ObjectId, BlobRef] = {}
        self.bytes_new = 0
        self.bytes_reused = 0

    @property
    def count_new(self) -> int:
        """How many objects were staged."""
        return len(self._staged)

    @property
    def count_reused(self) -> int:
        """How many were in the store before."""
        return len(self._reused)

    @property
    def damaged(self) -> list[BlobRef]:
        """Objects of the store that turned out damaged; staged ones replace them."""
        return list(self._damaged.values())

    def reuse(self, ref: BlobRef) -> bool:
        """
        Claim *ref* if the store has it already.

        It is touched first and looked at then; a collection renames first and looks then: one of them sees the other.
        """
        with self._guard:
            if ref.id in self._reused or ref.id in self._staged:
                return True
        return self.put_back(ref) and self._claimed_as_reused(ref)

    def spares_writing(self, ref: BlobRef) -> bool:
        """
        Claim *ref* if the store has it already; else the caller, who has its bytes, writes them.

        With *reads_reused* the object is read here, once: a damaged one has to be written again.
        """
        if not self._reads_reused:
            return self.reuse(ref)
        with self._guard:
            if ref.id in self._damaged:
                return False
            if ref.id in self._reused or ref.id in self._staged:
                return True
        home = self._layout.object(ref.id)
        try:
            if not self.put_back(ref):
                return False
            is_sound = self._store.is_sound(home, ref)
        except IntegrityError:
            if not self._files.is_file(home):
                raise  # a link or a folder: a person has to look at it
            is_sound = False
        if not is_sound:
            with self._guard:
                self._damaged[ref.id] = ref
            return False
        return self._claimed_as_reused(ref)

    def _claimed_as_reused(self, ref: BlobRef) -> bool:
        with self._guard:
            if ref.id not in self._reused:
                self._reused[ref.id] = ref
                self.bytes_reused += ref.size_bytes
        return True

    def claim(self, ref: BlobRef) -> bool:
        """
        Claim all that the version or state blob *ref* names, for a record that inherits it.

        A collection keeps what a young blob names. False if the blob is not at its place: a collection may be taking
        its objects, so each has to be reused for itself.
        """
        home = self._layout.object(ref.id)
        if not self._files.touch(home) or self._files.size(home) != ref.size_bytes:
            return False
        with self._guard:
            self._claimed[ref.id] = ref
        return True

    def put_back(self, ref: BlobRef) -> bool:
        """Touch *ref*, and link it back if it lies aside; return whether it is at its place."""
        home, aside = self._layout.object(ref.id), self._layout.aside / ref.id
        if not self._files.touch(home) and self._files.touch(aside):
            self._files.make_directory(home.parent)
            try:
                self._link(aside, ref)
            except StorageIO as exc:
                if exc.errno != errnos.ENOENT:  # gone from there, too
                    raise
            self._files.sync_directory(home.parent)
        size_bytes = self._files.size(home)
        if size_bytes is not None:
            check_size(ref, size_bytes, home)
        return size_bytes is not None

    def stage(self, ref: BlobRef, chunks: Iterable[Bytes]) -> None:
        """
        Write and sync the bytes of *ref*, which *chunks* yields.

        Raises:
            IntegrityError: *chunks* are not the bytes that *ref* names: they changed since they were hashed.
        """
        with self.draft() as draft:
            hasher = NameHasher()
            for data in chunks:
                draft.write_at(hasher.size_bytes, data)
                hasher.update(data)
            check_hash(ref, hasher)
            self.keep(draft, ref)

    def copy(self, ref: BlobRef, objects: ObjectStore) -> None:
        """Stage *ref* as another store has it; raises as `stage` does."""
        with objects.open(ref) as file:
            self.stage(ref, read_chunks(file))

    @contextlib.contextmanager
    def draft(self) -> Iterator[Stream]:
        """Yield a new file for bytes whose name is known only afterwards; it is removed unless it is kept."""
        path = self._layout.tmp / secrets.token_hex(16)
        with self._files.create(path, sync_ahead=True) as file:
            draft = Stream(file, past_cache=self._past_cache)
            try:
                yield draft
            finally:
                draft.close()
                if not draft.is_kept:
                    self._files.discard(path)

    def keep(self, draft: Stream, ref: BlobRef) -> bool:
        """Sync *draft* and stage it as *ref*, unless the store or another draft has that; return whether it was new."""
        if self.spares_writing(ref):
            return False
        draft.finish()
        with self._guard:
            if ref.id in self._staged:
                return False
            self._staged[ref.id] = ref, draft.path
            self.bytes_new += ref.size_bytes
            draft.is_kept = True
        return True

    def put(self, data: bytes, ref: BlobRef) -> None:
        """Stage the small object *data*, unless it is there already."""
        if not self.spares_writing(ref):
            self.stage(ref, [data])

    def publish(self) -> None:
        """
        Make everything staged visible and durable, together with what is reused.

        Once this returns, a power cut cannot lose any of it. If it raises, the store has more objects that nothing
        names.

        Raises:
            Overtaken: A reused object is gone: a collection or a repair has taken it.
        """
        # Once more, right before they are named: they may have been found hours ago.
        lost = [ref for ref in self._reused.values() if not self.put_back(ref)]
        if lost:
            raise Overtaken(
                f"object {lost[0].id}, which was there when this began, was removed meanwhile; nothing was saved",
                hint="repeat the command",
            )
        # Also of reused objects: their writer may have died before its own fsync.
        folders = sorted({self._layout.object(object_id).parent for object_id in (*self._staged, *self._reused)})
        for folder in folders:
            self._files.make_directory(folder, durable=False)
        self._files.sync_directory(self._layout.objects)
        for ref, path in self._staged.values():
            self._files.touch(path)  # it may have been written long ago
            if ref.id in self._damaged:
                self._files.rename(path, self._layout.object(ref.id))
            else:
                self._link(path, ref)
        for folder in folders:
            self._files.sync_directory(folder)

    def _link(self, source: Path, ref: BlobRef) -> None:
        target = self._layout.object(ref.id)
        if not self._files.link_exclusive(source, target):
            # Another writer was faster. Its bytes have the same name, so only their number can be wrong.
            self._files.touch(target)
            size_bytes = self._files.size(target)
            if size_bytes is None:
                self._files.link_exclusive(source, target)
            else:
                check_size(ref, size_bytes, target)

    def look_again(self) -> list[BlobRef]:
        """
        Return the objects that are gone after all; those that lie aside are linked back.

        Call this once the record that names them is visible: from then on no collection takes them.
        `claimed_elsewhere` tells of claimed blobs.
        """
        for ref, path in self._staged.values():
            if not self.put_back(ref) and self._files.exists(path):
                self._link(path, ref)
                self._files.sync_directory(self._layout.object(ref.id).parent)
        named = {ref.id: ref for ref, _ in self._staged.values()} | self._reused
        return [ref for ref in named.values() if not self.put_back(ref)]

    def claimed_elsewhere(self) -> list[BlobRef]:
        """Return the claimed blobs that are not at their places: their objects may be on their way out, too."""
        return [ref for ref in self._claimed.values() if not self.claim(ref)]

    def __enter__(self) -> "ObjectWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove what was staged and never published."""
        for _, path in self._staged.values():
            if self._files.exists(path):
                self._files.discard(path)
