"""
Objects that are fetched from a bucket on first read, each checked against its name before it is used.

Several processes may share the folder that they are fetched into.
"""

import contextlib
import errno as errnos
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from layerstore.errors import IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.layout import Layout
from layerstore.limits import REMOTE_REQUESTS_MAX
from layerstore.model import BlobRef, ObjectId, StoredObject
from layerstore.remote.cache import make_room, trim
from layerstore.remote.source import Source
from layerstore.remote.sparse import SparseObjects
from layerstore.storage import Files, ObjectStore, OpenFile, Stretch, alone

# The most objects to prefetch.
_AHEAD_MAX = 2 * REMOTE_REQUESTS_MAX
# How often others may evict an object from a small cache before we have opened it.
_EVICTIONS_MAX = 20


class FetchedObjects(ObjectStore):
    """Objects that are fetched on first read, then stay here; a mirror evicts them when it needs room."""

    def __init__(self, layout: Layout, files: Files, source: Source, *, is_mirror: bool = False) -> None:
        super().__init__(layout, files)
        self.source = source
        self._is_mirror = is_mirror
        self._objects = ObjectStore(layout, files)
        """The objects that are here."""
        self._pool = ThreadPoolExecutor(REMOTE_REQUESTS_MAX, thread_name_prefix="fetch")
        self._guard = threading.Lock()
        self._coming: dict[ObjectId, Future[None]] = {}
        self._expected: deque[BlobRef] = deque()
        self._ahead: set[ObjectId] = set()
        """Prefetched objects that nobody has asked for yet."""
        self._sparse_objects = SparseObjects(layout, files, source, self._pool, make_room=self._make_room)
        self._bytes_of_wholes = 0
        self._is_closed = False

    def close(self) -> None:
        """Cancel pending downloads; trim a mirror's cache to its size."""
        was_closed, self._is_closed = self._is_closed, True
        self._pool.shutdown(cancel_futures=True)
        if self._is_mirror and self.bytes_fetched and not was_closed:
            trim(self._files)

    @property
    def bytes_fetched(self) -> int:
        """How many bytes were fetched from the bucket."""
        return self._bytes_of_wholes + self._sparse_objects.bytes_fetched

    def find(self, ref: BlobRef) -> Path | None:
        """Return where *ref* is or will be: if the bucket has a record, it has all that the record names."""
        return self.find_at_once(ref) or self._layout.object(ref.id)

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless *ref* is here, or its source lists it in full size."""
        if self.find_at_once(ref) is None:
            self.source.check_there(ref)

    def verify(self, ref: BlobRef) -> None:
        """Make sure that *ref* is here and matches its name; raises as `open` does."""
        self._arrived(ref)

    def verify_all(self, stretches: Mapping[BlobRef, Iterable[Stretch]]) -> set[BlobRef]:
        """Make sure that *stretches* are here and sound; return the objects that are completely so."""
        chunks = {ref: self._sparse_objects.chunks(ref, of) for ref, of in stretches.items() if not self._is_here(ref)}
        whole = {ref for ref in stretches if not chunks.get(ref)}
        self.expect(whole)
        for ref in whole:
            self._arrived(ref)
        for ref in stretches.keys() - whole:
            self._opened_sparse(ref, chunks[ref]).close()
        return whole

    def _opened_sparse(self, ref: BlobRef, numbers: Sequence[int]) -> OpenFile:
        try:
            for _ in range(_EVICTIONS_MAX):
                try:
                    return self._sparse_objects.open(ref, numbers)
                except StorageIO as exc:
                    if exc.errno != errnos.ENOENT:
                        raise  # otherwise another process evicted it right before we opened it
            return self._sparse_objects.open(ref, numbers)
        except (NotFound, IntegrityError) as exc:
            raise self.source.damaged(ref, exc) from exc

    def _is_here(self, ref: BlobRef) -> bool:
        return self._files.exists(self._layout.object(ref.id))

    def know(self, objects: Iterable[StoredObject]) -> None:
        """Note what a version says about *objects*."""
        self._sparse_objects.know(objects)

    def open(self, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        """Open *ref*, first fetching what is missing of *stretches*, or of the whole object."""
        numbers = [] if stretches is None or self._is_here(ref) else self._sparse_objects.chunks(ref, stretches)
        if numbers:
            return self._opened_sparse(ref, numbers)
        self._arrived(ref)
        for _ in range(_EVICTIONS_MAX):
            with contextlib.suppress(IntegrityError):
                return self._objects.open(ref)
            self._forget(ref)  # it was evicted from a full cache
            self._arrived(ref)
        return self._objects.open(ref)

    def expect(self, refs: Iterable[BlobRef]) -> None:
        """Start to fetch *refs*, in order, but not too far ahead of the reader."""
        with self._guard:
            self._expected.extend(refs)
            self._set_out()

    def _arrived(self, ref: BlobRef) -> None:
        self.source.check_process()  # its threads do not exist in a forked child
        with self._guard:
            self._ahead.discard(ref.id)
            coming = self._on_its_way(ref)
            self._set_out()
        try:
            coming.result()
        except CancelledError:
            self._check_open()
            raise
        except BaseException:
            self._forget(ref)  # the next reader tries again
            raise

    def _set_out(self) -> None:
        while self._expected and len(self._ahead) < _AHEAD_MAX:
            ref = self._expected.popleft()
            if ref.id not in self._coming:
                self._ahead.add(ref.id)
                self._on_its_way(ref)

    def _on_its_way(self, ref: BlobRef) -> "Future[None]":
        coming = self._coming.get(ref.id)
        if coming is None:
            self._check_open()
            coming = self._coming[ref.id] = self._pool.submit(self._fetch, ref)
        return coming

    def _forget(self, ref: BlobRef) -> None:
        with self._guard:
            self._coming.pop(ref.id, None)

    def _fetch(self, ref: BlobRef) -> None:
        home = self._layout.object(ref.id)
        if not self.is_sound(home, ref):  # a rotted one is fetched again
            with alone(self._layout.locks / f"fetch-{ref.id}"):
                if not self.is_sound(home, ref):
                    self._download(ref)
        self._files.touch(home)  # eviction is least recently used first

    def _download(self, ref: BlobRef) -> None:
        home, path = self._layout.object(ref.id), self._layout.tmp / secrets.token_hex(16)
        self._make_room(ref.size_bytes)
        try:
            with self._files.create(path) as file:
                for offset, data in self.source.checked(ref):
                    self._check_open()
                    file.write_at(offset, data)
                if not self._is_mirror:
                    file.sync()  # writers reuse it without another sync
            self._files.make_directory(home.parent, durable=False)
            self._files.rename(path, home)
        finally:
            self._files.discard(path)
        self._bytes_of_wholes += ref.size_bytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInput(f"{self.source.url} was closed, and nothing more is fetched", hint="open it again")

    def _make_room(self, size_bytes: int) -> None:
        if self._is_mirror:
            make_room(self._files, size_bytes)
