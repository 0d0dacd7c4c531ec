"""
Objects that are fetched from a bucket on first read, each checked against its id before use.

No check is remembered: verifying an object reads and hashes it every time. The only exception is an object that was
fetched for the current use, since it was hashed on arrival.
Several processes may share the folder into which objects are fetched. If a stretch is enough, no more is fetched.
"""

import contextlib
import errno as errnos
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path

from layerstore.disk import Files, NewFile, OpenFile, alone
from layerstore.errors import IntegrityError, InvalidInput, NoStore, NotFound, StorageIO
from layerstore.hashing import NameHasher, check_chunk
from layerstore.layers import typed
from layerstore.layout import OBJECT_ID, Layout
from layerstore.limits import REMOTE_REQUESTS_MAX, VERIFY_CHUNK_BYTES
from layerstore.model import BlobRef, ObjectId, StoredObject
from layerstore.remote.bucket import Bucket
from layerstore.storage import ObjectStore, Stretch, check_hash, read_chunks
from layerstore.threads import Threads, run_all

# How many objects to prefetch at most.
_AHEAD_MAX = 2 * REMOTE_REQUESTS_MAX
# How often other processes may evict an object from a small cache before we give up opening it.
_EVICTIONS_MAX = 20


class Source:
    """The objects in a bucket or, if the bucket lacks them, in *rest*; *url* is opened on first use."""

    def __init__(self, url: str, layout: Layout, *, bucket: Bucket | None = None, rest: "Source | None" = None) -> None:
        self.url = url
        self._rest = rest
        self._layout = layout
        self._bucket = bucket
        self._guard = threading.Lock()
        self._sizes: dict[str, dict[ObjectId, int]] = {}

    @property
    def bucket(self) -> Bucket:
        """The bucket."""
        with self._guard:
            if self._bucket is None:
                self._bucket = Bucket(self.url)
            return self._bucket

    def listed(self, prefix: str) -> dict[ObjectId, int]:
        """Return the sizes of objects whose ids start with the two digits *prefix*; cached until `look_anew`."""
        sizes = self._sizes  # read first: a listing that began before `look_anew` must not be used afterwards
        if prefix not in sizes:
            folder = f"{self._layout.objects.name}/{prefix}"
            entries = self.bucket.listed(folder)
            names = ((entry.name.removeprefix(f"{folder}/"), entry.size_bytes) for entry in entries)
            sizes[prefix] = {ObjectId(name): size for name, size in names if OBJECT_ID.fullmatch(name)}
            if self._rest is not None:
                sizes[prefix] = self._rest.listed(prefix) | sizes[prefix]
        return sizes[prefix]

    def check_process(self) -> None:
        """Raise Internal in a forked child of the process that opened the bucket."""
        if self._bucket is not None:
            self._bucket.check_process()

    def look_anew(self) -> None:
        """Forget the listings, since the bucket may have changed."""
        self._sizes = {}

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless the bucket lists *ref* in full size."""
        size_bytes = self.listed(ref.id[:2]).get(ref.id)
        if size_bytes is None:
            raise self.damaged(ref, NotFound(f"object {ref.id} is missing"))
        if size_bytes != ref.size_bytes:
            problem = f"object {ref.id} has {size_bytes} bytes, expected {ref.size_bytes}"
            raise self.damaged(ref, IntegrityError(problem))

    def checked(self, ref: BlobRef) -> Iterator[tuple[int, memoryview]]:
        """
        Yield the bytes of *ref* from the bucket, each piece with its offset.

        Raises:
            IntegrityError: *ref* is missing; or, raised at the end, its bytes do not match the id.
        """
        if (holder := self._holder_of(ref)) is not self:
            yield from holder.checked(ref)
            return
        hasher = NameHasher()
        name = self._layout.object_name(ref.id)
        try:
            for data in self.bucket.chunks(name, start=0, size_bytes=ref.size_bytes, is_whole=True):
                yield hasher.size_bytes, data
                hasher.update(data)
            check_hash(ref, hasher)
        except NoStore:
            raise  # the bucket itself is missing, so the object need not be damaged
        except (NotFound, IntegrityError) as exc:
            raise self.damaged(ref, exc) from exc

    def _holder_of(self, ref: BlobRef) -> "Source":
        if self._rest is None or self.bucket.size(self._layout.object_name(ref.id)) is not None:
            return self
        return self._rest

    def chunks(self, ref: BlobRef, *, start: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield a stretch of *ref*, unchecked."""
        bucket = self._holder_of(ref).bucket
        yield from bucket.chunks(self._layout.object_name(ref.id), start=start, size_bytes=size_bytes)

    def check_bytes(self, ref: BlobRef) -> None:
        """Read all of *ref* from the bucket and compare its hash with the id; raises as `checked` does."""
        for _ in self.checked(ref):
            pass

    def damaged(self, ref: BlobRef, problem: Exception) -> IntegrityError:
        """Return the error for *ref*, which the bucket has lost or damaged."""
        text, is_missing = str(problem), isinstance(problem, NotFound)
        option = "" if is_missing else " --read-data"
        return IntegrityError(
            text if text.startswith(self.url) else f"{self.url}: {text}",
            hint=f"layerstore --store OTHER repair{option} --remote {typed(self.url)} puts it back, "
            "if OTHER has an intact copy",
            object_id=ref.id,
            is_missing=is_missing,
            remote=self.url,
        )


class FetchedObjects(ObjectStore):
    """
    The objects of a partial clone: missing objects are fetched on first use, and kept.

    A damaged object is reported as in any store, not fetched again: the bucket may never have had it.
    """

    _is_durable = True

    def __init__(self, layout: Layout, files: Files, source: Source) -> None:
        super().__init__(layout, files)
        self.source = source
        self._objects = ObjectStore(layout, files)
        """The objects on this disk."""
        self._pool = Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="fetch")
        self._sparse_objects = _SparseObjects(layout, files, source, self._pool, make_room=self._make_room)
        self._bytes_of_whole_objects = 0
        self._is_closed = False

    def close(self) -> None:
        """Cancel pending downloads."""
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    @property
    def bytes_fetched(self) -> int:
        """How many bytes were fetched from the bucket."""
        return self._bytes_of_whole_objects + self._sparse_objects.bytes_fetched

    def find(self, ref: BlobRef) -> Path | None:
        """Return the path of *ref*, whether or not it is already fetched."""
        # Never None: if the bucket has a record, it has everything that the record references.
        return self.find_at_once(ref) or self._layout.object(ref.id)

    def look_anew(self) -> None:
        """Forget the source's listings: the source may have lost objects since."""
        self.source.look_anew()

    def check_there(self, ref: BlobRef) -> None:
        """Raise IntegrityError unless *ref* is on this disk, or the source lists it in full size."""
        if self.find_at_once(ref) is None:
            self.source.check_there(ref)

    def check_bytes(self, ref: BlobRef) -> None:
        """Read all of *ref*, from this disk or else the bucket, and compare its hash with the id; keep nothing."""
        if self.find_at_once(ref) is None:
            self.source.check_bytes(ref)
        else:
            self._objects.verify(ref)

    def verify(self, ref: BlobRef) -> None:
        """Fetch *ref*, or read it from this disk, and compare its hash with the id; raises as `open` does."""
        self.wait(self.start(ref))

    def verify_all(self, stretches: Mapping[BlobRef, Iterable[Stretch]]) -> set[BlobRef]:
        """Make sure that *stretches* are on this disk and sound; return the objects that were verified as a whole."""
        chunks = {
            ref: self._sparse_objects.chunks(ref, wanted) for ref, wanted in stretches.items() if not self._is_here(ref)
        }
        whole = {ref for ref in stretches if not chunks.get(ref)}
        with self.expected(whole) as objects:
            for ref in whole:
                objects.verify(ref)
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
                        raise  # ENOENT, by contrast: another process evicted the file right before we opened it
            return self._sparse_objects.open(ref, numbers)
        except (NotFound, IntegrityError) as exc:
            raise self.source.damaged(ref, exc) from exc

    def _is_here(self, ref: BlobRef) -> bool:
        return any(self._files.exists(path) for path in self._places_now(ref.id))

    def know(self, version: BlobRef, objects: Iterable[StoredObject]) -> None:
        """Remember how *objects*, which *version* references, can be verified in parts."""
        self._sparse_objects.know(objects)

    def open(self, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        """Open *ref*, after fetching the missing parts of *stretches*, or of the whole object."""
        numbers = [] if stretches is None or self._is_here(ref) else self._sparse_objects.chunks(ref, stretches)
        if numbers:
            return self._opened_sparse(ref, numbers)
        for _ in range(_EVICTIONS_MAX):
            if self._is_here(ref):
                with contextlib.suppress(IntegrityError):
                    return self._objects.open(ref)
            self.verify(ref)  # it is missing, was evicted from a full cache, or has the wrong size
        return self._objects.open(ref)

    @contextlib.contextmanager
    def expected(self, refs: Iterable[BlobRef]) -> Iterator[ObjectStore]:
        """Yield the objects for one use of *refs*, which are fetched or verified in this order, ahead of the reader."""
        with contextlib.closing(_Expected(self, self._layout, self._files, refs)) as objects:
            yield objects

    def start(self, ref: BlobRef) -> "Future[None]":
        """Begin to verify *ref*, or to fetch it; return a future for `wait`."""
        self.source.check_process()  # the pool's threads do not exist in a forked child
        self._check_open()
        return self._pool.submit(self._verify_or_fetch, ref)

    def wait(self, verified: "Future[None]") -> None:
        """Wait for a verification that `start` began; raises if it failed, or if `close` was called."""
        try:
            verified.result()
        except CancelledError:
            self._check_open()
            raise

    def _verify_or_fetch(self, ref: BlobRef) -> None:
        if self.find_at_once(ref) is not None:
            self._objects.verify(ref)
            return
        with alone(self._layout.locks / f"fetch-{ref.id}"):
            if self.find_at_once(ref) is None:
                self._download(ref)
                return
        # Another process fetched the object while we waited; that process's check does not count for us.
        self._objects.verify(ref)

    def _download(self, ref: BlobRef) -> None:
        home, path = self._layout.object(ref.id), self._layout.tmp / secrets.token_hex(16)
        self._make_room(ref.size_bytes)
        try:
            with self._files.create(path) as file:
                for offset, data in self.source.checked(ref):
                    self._check_open()
                    file.write_at(offset, data)
                if self._is_durable:
                    file.sync()  # writers reuse it without another sync
            self._files.make_directory(home.parent, durable=False)
            # A rename, to replace any damaged copy in a cache. The bytes match the id: `checked` ended without error.
            self._files.rename(path, home)
        finally:
            self._files.discard(path)
        self._bytes_of_whole_objects += ref.size_bytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInput(f"{self.source.url} was closed, and nothing more is fetched", hint="open it again")

    def _make_room(self, size_bytes: int) -> None:
        """Do nothing: a clone only grows. In a cache, this evicts objects."""


class _Expected(ObjectStore):
    """A store for one pass over objects: each is verified once, ahead of its readers, and opened only afterwards."""

    def __init__(self, objects: FetchedObjects, layout: Layout, files: Files, refs: Iterable[BlobRef]) -> None:
        super().__init__(layout, files)
        self._objects = objects
        self._guard = threading.Lock()
        self._expected = deque(dict.fromkeys(refs))
        self._verified: dict[BlobRef, Future[None]] = {}
        self._ahead: set[BlobRef] = set()
        """Objects that are being or were prefetched, and that no reader has requested yet."""
        self._start_prefetch()

    def close(self) -> None:
        """Cancel verifications that have not begun."""
        for verified in self._verified.values():
            verified.cancel()

    def verify(self, ref: BlobRef) -> None:
        """Return once *ref* is on this disk and verified; raises if it is damaged."""
        with self._guard:
            verified = self._start(ref)
            self._ahead.discard(ref)
            self._start_prefetch()
        self._objects.wait(verified)

    def open(self, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        """Open *ref* once it is verified."""
        self.verify(ref)
        return self._objects.open(ref, stretches)

    def _start_prefetch(self) -> None:
        while self._expected and len(self._ahead) < _AHEAD_MAX:
            ref = self._expected.popleft()
            if ref not in self._verified:
                self._ahead.add(ref)
                self._start(ref)

    def _start(self, ref: BlobRef) -> "Future[None]":
        verified = self._verified.get(ref)
        if verified is None:
            verified = self._verified[ref] = self._objects.start(ref)
        return verified


class _SparseObjects:
    """
    The folder ``sparse/``: incomplete objects, since a resume on a different number of ranks may need only stretches.

    Objects are fetched in chunks of 16 MiB into sparse files, and each chunk is checked against its digest in the
    version blob. Chunks already in a file are checked again, so nothing needs to record which chunks a file has.
    """

    def __init__(
        self, layout: Layout, files: Files, source: Source, pool: Executor, *, make_room: Callable[[int], None]
    ) -> None:
        self._layout = layout
        self._files = files
        self._source = source
        self._pool = pool
        self._make_room = make_room
        self._digests: dict[ObjectId, bytes] = {}
        self.bytes_fetched = 0

    def know(self, objects: Iterable[StoredObject]) -> None:
        """Remember the digests of those *objects* that are large enough to be fetched in parts."""
        self._digests.update((stored.id, stored.chunks) for stored in objects if stored.size_bytes > VERIFY_CHUNK_BYTES)

    def chunks(self, ref: BlobRef, stretches: Iterable[Stretch]) -> list[int]:
        """Return the numbers of the chunks that *stretches* of *ref* touch; none if *ref* is to be fetched whole."""
        if ref.id not in self._digests:
            return []
        numbers = {number for start, end in stretches for number in range(start // VERIFY_CHUNK_BYTES, _chunks_to(end))}
        return sorted(numbers) if len(numbers) < _chunks_to(ref.size_bytes) else []

    def open(self, ref: BlobRef, numbers: Sequence[int]) -> OpenFile:
        """
        Open a file that has the chunks *numbers* of *ref* at their offsets; missing chunks are fetched.

        Raises:
            IntegrityError: *ref* is damaged in the bucket.
            NotFound: The bucket does not have *ref*.
        """
        path = self._layout.sparse / ref.id
        # Opened under the lock, and kept open: if the file is then evicted, this reader still has its chunks.
        with alone(self._layout.locks / f"sparse-{ref.id}"):
            if not self._files.exists(path):
                self._make_sparse(path.name, ref)
            source = self._files.open(path)
            try:
                with self._files.overwrite(path) as target:
                    run_all(self._pool, lambda number: self._fetch_chunk(ref, number, source, target), numbers)
            except BaseException:
                source.close()
                raise
        self._files.touch(path)  # the least recently used are evicted first
        return source

    def _make_sparse(self, name: str, ref: BlobRef) -> None:
        folder, made = self._layout.sparse, self._layout.tmp / secrets.token_hex(16)
        self._files.make_directory(folder, durable=False)
        # Full size from the start, and never synced: a chunk lost in a power cut fails its check, and is fetched again.
        with self._files.create(made) as file:
            file.write_at(ref.size_bytes - 1, b"\0")
        self._files.rename(made, folder / name)

    def _fetch_chunk(self, ref: BlobRef, number: int, source: OpenFile, target: NewFile) -> None:
        start = number * VERIFY_CHUNK_BYTES
        size_bytes = min(VERIFY_CHUNK_BYTES, ref.size_bytes - start)
        digests = self._digests[ref.id]
        try:
            check_chunk(ref, digests, number, read_chunks(source, start, size_bytes))
        except IntegrityError:
            self._make_room(size_bytes)
            check_chunk(ref, digests, number, self._fetched(ref, start, size_bytes, target))
            self.bytes_fetched += size_bytes

    def _fetched(self, ref: BlobRef, start: int, size_bytes: int, target: NewFile) -> Iterator[memoryview]:
        """Yield a stretch of *ref* as it arrives, and write it to *target*; nobody reads *target* before the check."""
        at = start
        for data in self._source.chunks(ref, start=start, size_bytes=size_bytes):
            target.write_at(at, data)
            at += len(data)
            yield data


def _chunks_to(end: int) -> int:
    return -(-end // VERIFY_CHUNK_BYTES)
