"""
New objects: staged in ``tmp/``, then published together, durably, once their source has proven sound.

For the write order and crashes, see docs/reference/format.md, section 6.
"""

import contextlib
import errno as errnos
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from layerstore.disk import Files, Stream, Syncing, hours_on
from layerstore.errors import IntegrityError, Overtaken, StorageIO
from layerstore.hashing import Bytes, NameHasher
from layerstore.layout import Layout
from layerstore.model import BlobRef, ObjectId
from layerstore.storage.objects import ObjectStore, check_hash, check_size, read_chunks

_FRESH_SECONDS = 60.0
"""The age up to which a written file need not be touched: no collection takes it for some minutes more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Objects that another process has staged, or found in the store, for the same commit."""

    new: tuple[tuple[BlobRef, Path], ...]
    """New objects, each with its file in ``tmp/``."""
    reused: tuple[BlobRef, ...]
    referred: tuple[BlobRef, ...]
    """The references of coded objects."""
    damaged: tuple[BlobRef, ...]


class Draft(Protocol):
    """A new object, whose name becomes known only once all its bytes are written."""

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write *data* at *offset*, where the last write ended."""


class ObjectWriter:
    """
    One commit's new objects: staged first, then published together once their source has proven sound.

    Thread-safe. *past_cache* bypasses the page cache, for bytes that nobody will reread soon. With *reads_reused*,
    objects that the store already has are read once and checked against their names.
    """

    def __init__(
        self, layout: Layout, files: Files, store: ObjectStore, *, past_cache: bool = False, reads_reused: bool = False
    ) -> None:
        self._layout = layout
        self._files = files
        self.store = store
        self._past_cache = past_cache
        self.reads_reused = reads_reused
        self._guard = threading.Lock()
        self._syncing = Syncing()
        self._staged: dict[ObjectId, tuple[BlobRef, Path]] = {}
        self._written_at: dict[ObjectId, float] = {}
        self._damaged: dict[ObjectId, BlobRef] = {}
        self._reused: dict[ObjectId, BlobRef] = {}
        self._referred: dict[ObjectId, BlobRef] = {}
        self._claimed: dict[ObjectId, BlobRef] = {}
        self._is_over = False
        self._bytes_new = 0
        self._bytes_reused = 0

    @property
    def bytes_new(self) -> int:
        """How many bytes were staged."""
        return self._bytes_new

    @property
    def bytes_reused(self) -> int:
        """How many bytes were already in the store."""
        return self._bytes_reused

    @property
    def count_new(self) -> int:
        """How many objects were staged."""
        return len(self._staged)

    @property
    def count_reused(self) -> int:
        """How many objects were already in the store."""
        return len(self._reused)

    @property
    def damaged(self) -> list[BlobRef]:
        """Objects in the store that turned out to be damaged; staged objects replace them."""
        return list(self._damaged.values())

    def reuse(self, ref: BlobRef) -> bool:
        """
        Claim *ref* if the store already has it; return whether it does.

        A writer touches first, then looks; a collection renames first, then looks. So one of the two sees the other.
        """
        with self._guard:
            if ref.id in self._reused or ref.id in self._staged:
                return True
        # Without the lock, because a touch may wait for a server; touching twice does no harm.
        return self.put_back(ref) and self._claimed_as_reused(ref)

    def refer(self, ref: BlobRef) -> bool:
        """Claim *ref*, which is needed to read what is saved; return whether the store has it."""
        is_there = self.put_back(ref)
        if is_there:
            with self._guard:
                # Kept apart from reused objects, whose bytes count towards this save.
                self._referred[ref.id] = ref
        return is_there

    def spares_writing(self, ref: BlobRef) -> bool:
        """
        Claim *ref* if the store already has it; return whether it does. If not, the caller must write its bytes.

        With *reads_reused*, the object is also read, once; a damaged object counts as absent, so that it is rewritten.
        """
        if not self.reads_reused:
            return self.reuse(ref)
        with self._guard:
            if ref.id in self._damaged:
                return False
            if ref.id in self._reused or ref.id in self._staged:
                return True
        is_sound = self._is_sound(ref)
        if is_sound is False:
            with self._guard:
                self._damaged[ref.id] = ref
        return bool(is_sound) and self._claimed_as_reused(ref)

    def _is_sound(self, ref: BlobRef) -> bool | None:
        """Read *ref* in the store; return whether it is sound; None if it is missing."""
        home = self._layout.object(ref.id)
        try:
            return self.store.is_sound(home, ref) if self.put_back(ref) else None
        except IntegrityError:
            if not self._files.is_file(home):
                raise  # a link or a folder needs a person's attention
            return False

    @property
    def _found(self) -> tuple[BlobRef, ...]:
        """The claimed objects that the store already had."""
        return (*self._reused.values(), *self._referred.values())

    def _claimed_as_reused(self, ref: BlobRef) -> bool:
        with self._guard:
            if ref.id not in self._reused:
                self._reused[ref.id] = ref
                self._bytes_reused += ref.size_bytes
        return True

    def claim(self, ref: BlobRef) -> bool:
        """
        Claim everything that the version or state blob *ref* refers to, for a record that inherits *ref*.

        Touching the blob is enough, because a collection keeps the objects of a young blob. Return False if the blob is
        not in ``objects/``: a collection may be removing its objects, so each of them must be reused separately.
        """
        home = self._layout.object(ref.id)
        # Touch first, then look, as in `reuse`.
        if not self._files.touch(home) or self._files.size(home) != ref.size_bytes:
            return False
        with self._guard:
            self._claimed[ref.id] = ref
        return True

    def unclaimed(self, refs: Sequence[BlobRef]) -> list[BlobRef]:
        """Claim *refs*; return those that cannot be claimed."""
        return [ref for ref in refs if not self.claim(ref)]

    def put_back(self, ref: BlobRef) -> bool:
        """Touch *ref*, linking it back if it lies aside; return whether it is in ``objects/``."""
        home = self._layout.object(ref.id)
        if not self._files.touch(home):
            aside = self._layout.aside / ref.id
            # Touch before linking: a collection rereads the time right before it unlinks an object that lies aside.
            if not self._files.touch(aside):
                return False
            self._files.make_directory(home.parent)
            try:
                self._link(aside, ref)
            except StorageIO as exc:
                if exc.errno != errnos.ENOENT:  # gone from aside too
                    raise
            self._files.sync_directory(home.parent)
        size_bytes = self._files.size(home)
        if size_bytes is not None:
            check_size(ref, size_bytes, home)
        return size_bytes is not None

    def stage(self, ref: BlobRef, chunks: Iterable[Bytes]) -> None:
        """
        Write and sync the object *ref*, whose bytes *chunks* yields.

        Raises:
            IntegrityError: *chunks* do not match *ref*: they changed since they were hashed.
        """
        with self.draft() as draft:
            hasher = NameHasher()
            for data in chunks:
                draft.write_at(hasher.size_bytes, data)
                hasher.update(data)
            check_hash(ref, hasher)
            self.keep(draft, ref)

    def copy(self, ref: BlobRef, objects: ObjectStore) -> None:
        """Stage *ref* from another store; raises as `stage` does."""
        with objects.open(ref) as file:
            self.stage(ref, read_chunks(file))

    @contextlib.contextmanager
    def draft(self) -> Iterator[Draft]:
        """Yield a new file for bytes whose name becomes known only afterwards; the file is removed unless kept."""
        path = self._layout.tmp / secrets.token_hex(16)
        file = self._files.create(path, sync_ahead=True)
        draft = Stream(file, past_cache=self._past_cache)
        try:
            yield draft
        finally:
            draft.close()
            if not draft.is_kept:
                file.close()
                self._files.discard(path)

    def keep(self, draft: Draft, ref: BlobRef) -> bool:
        """
        Stage *draft* as *ref*, unless *ref* is in the store or already staged; return whether it was new.

        The draft is synced in the background; `publish` waits for it. Raises if an earlier draft could not be synced.
        """
        return not self.spares_writing(ref) and self._keep(draft, ref)

    def _keep(self, draft: Draft, ref: BlobRef) -> bool:
        assert isinstance(draft, Stream), "it is a draft of ours"
        draft.finish()
        with self._guard:
            # `discard` removes what was staged before the call: a file added later would stay in ``tmp/``.
            if self._is_over or ref.id in self._staged:
                return False
            self._staged[ref.id] = ref, draft.file.path
            self._written_at[ref.id] = hours_on()
            self._bytes_new += ref.size_bytes
            draft.is_kept = True
        # Without the lock: this may wait for the disk.
        self._syncing.add([draft.file])
        return True

    def put(self, data: Bytes, ref: BlobRef) -> None:
        """Stage the small object *data*, whose name is *ref*, unless the store has it."""
        if not self.spares_writing(ref):
            with self.draft() as draft:
                draft.write_at(0, data)
                self._keep(draft, ref)

    @property
    def staged(self) -> Staged:
        """The objects staged so far, made durable, and the claimed objects that the store had."""
        self._syncing.wait()
        with self._guard:
            return Staged(
                new=tuple(self._staged.values()),
                reused=tuple(self._reused.values()),
                referred=tuple(self._referred.values()),
                damaged=tuple(self._damaged.values()),
            )

    def join(self, others: Staged) -> None:
        """Add what another process has staged, to be published with the rest; that process still owns its files."""
        with self._guard:
            for ref, path in others.new:
                if ref.id not in self._staged:
                    self._staged[ref.id] = ref, path
                    self._bytes_new += ref.size_bytes
            for ref in others.reused:
                if ref.id not in self._reused and ref.id not in self._staged:
                    self._reused[ref.id] = ref
                    self._bytes_reused += ref.size_bytes
            self._referred.update((ref.id, ref) for ref in others.referred)
            self._damaged.update((ref.id, ref) for ref in others.damaged)

    def publish(self) -> None:
        """
        Make everything staged visible and durable, along with what is reused.

        Once this returns, a power cut cannot lose any of it. If this raises, new unreferenced objects may be left.

        Raises:
            Overtaken: A reused object is gone: a collection or a repair has removed it.
        """
        self._syncing.wait()
        # Touch found objects again right before the record refers to them: they may have been found hours ago.
        lost = [ref for ref in self._found if not self.put_back(ref)]
        if lost:
            raise Overtaken(
                f"object {lost[0].id}, which was there before, was removed meanwhile; nothing was saved",
                hint="try again",
            )
        # The folders of reused objects, too: the writer of such an object may have died before its fsync.
        folders = sorted(
            {self._layout.object(object_id).parent for object_id in (*self._staged, *self._reused, *self._referred)}
        )
        for folder in folders:
            if not self._files.is_directory(folder):
                self._files.make_directory(folder, durable=False)
        # Sync the new folders' entries before anything is linked into these folders.
        self._files.sync_directory(self._layout.objects)
        # In the order of staging: a blob promises that the objects it refers to exist, so it comes after them.
        for ref, path in self._staged.values():
            # A collection could take an old file as soon as it is linked, so an old file is touched first. So are the
            # files of other processes, since their age is unknown.
            if hours_on() > self._written_at.get(ref.id, 0) + _FRESH_SECONDS:
                self._files.touch(path)
            if ref.id in self._damaged:
                # The only case in which an object is replaced: a damaged one, by the bytes that its name promises.
                self._files.rename(path, self._layout.object(ref.id))
            else:
                self._link(path, ref)
        self._syncing.sync_each(self._files.sync_directory, folders)

    def _link(self, source: Path, ref: BlobRef) -> None:
        target = self._layout.object(ref.id)
        if not self._files.link_exclusive(source, target):
            # Another writer was faster. Its bytes have the same name, so only their size can be wrong.
            self._files.touch(target)
            size_bytes = self._files.size(target)
            if size_bytes is None:
                # A collection has just moved the other writer's object aside.
                self._files.link_exclusive(source, target)
            else:
                check_size(ref, size_bytes, target)

    def look_again(self) -> list[BlobRef]:
        """
        Link back the objects that lie aside; return those that are gone after all.

        Call this once the record that needs the objects is visible: from then on, no collection takes any of them. For
        claimed blobs, see `claimed_elsewhere`.
        """
        lost = [ref for ref in self._found if not self.put_back(ref)]
        for ref, path in self._staged.values():
            if self._files.touch(self._layout.object(ref.id)) or self.put_back(ref):
                continue
            if self._files.exists(path):
                self._link(path, ref)
                self._files.sync_directory(self._layout.object(ref.id).parent)
            if not self.put_back(ref):
                lost.append(ref)
        return lost

    def claimed_elsewhere(self) -> list[BlobRef]:
        """Return the claimed blobs that have left ``objects/``: what they refer to may be about to leave, too."""
        return [ref for ref in self._claimed.values() if not self.claim(ref)]

    def __enter__(self) -> "ObjectWriter":
        return self

    def __exit__(self, *_: object) -> None:
        # After a success too: once `look_again` is done, the names in ``tmp/`` are no longer needed.
        self.discard()

    def discard(self) -> None:
        """Remove what was staged but never published; anything that running threads still add is dropped."""
        with self._guard:
            self._is_over = True
        self._syncing.close()
        for _, path in self._staged.values():
            self._files.discard(path)
