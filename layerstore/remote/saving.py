"""
Saves directly to a bucket: objects are uploaded from memory, then the blobs that reference them, then parts and record.

A bucket cannot touch, link or move anything, and nothing depends on conditional writes. A save relies on an object if
the save has just uploaded it, if the object is less than half a day old, or if a record in the bucket references it. In
each case, no collection removes the object before the save's own record is written (docs/internals/durability.md).
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial

from layerstore.disk import Files, hours_on
from layerstore.errors import IntegrityError, Overtaken
from layerstore.format import STATE_MAGIC, VERSION_MAGIC, part_name, seal_part, unseal_part
from layerstore.hashing import Bytes
from layerstore.history import Needs
from layerstore.layout import Layout
from layerstore.limits import (
    IO_CHUNK_BYTES,
    RECORD_BYTES_MAX,
    REMOTE_FLIGHT_BYTES,
    REMOTE_GRACE_SECONDS,
    REMOTE_MOMENT_SECONDS,
    REMOTE_REQUESTS_MAX,
)
from layerstore.model import BlobRef, Commit, ObjectId
from layerstore.parts import Part
from layerstore.remote.bucket import Bucket
from layerstore.remote.identity import collected_since
from layerstore.storage import Draft, ObjectStore, ObjectWriter, PartStore, Repository, Staged
from layerstore.threads import Threads

_YOUNG_SECONDS = REMOTE_GRACE_SECONDS / 2
"""A save relies on an object older than this only if a record references the object."""
_STILL_YOUNG_SECONDS = REMOTE_GRACE_SECONDS * 2 / 3
"""The age limit, instead of `_YOUNG_SECONDS`, when a save checks all of its objects again."""
_WINDOW_SECONDS = REMOTE_GRACE_SECONDS / 8
"""How old a check may be when the part is written, and how old a part may be when the record is written."""


class Reliance:
    """Decides what saves may rely on in the bucket that *repo* mirrors; *refresh* re-reads its records and pins."""

    def __init__(self, bucket: Bucket, repo: Repository, refresh: Callable[[], None]) -> None:
        self.bucket = bucket
        self._repo = repo
        self._refresh = refresh
        self._guard = threading.RLock()
        self._refreshed_at = hours_on()
        self._server_ahead_ns: int | None = None
        self._version_of: dict[ObjectId, ObjectId] = {}
        """For each object, a version that references it, among the versions read so far."""

    def know(self, objects: Iterable[ObjectId], version: ObjectId) -> None:
        """Remember that *version* references *objects*."""
        self._version_of.update(dict.fromkeys(objects, version))

    def note_named(self, blobs: Iterable[BlobRef]) -> None:
        """Treat *blobs* as referenced by a record until the next reading of the records, half a day after the last."""
        with self._guard:
            self._blobs.update(blob.id for blob in blobs)

    def ask_time(self) -> None:
        """Ask the server for its time, because this host may have been suspended since the last call."""
        sent_at = hours_on()
        self._server_ahead_ns = self.bucket.now_ns() - int(sent_at * 1e9)

    def server_ns(self, at: float) -> int:
        """Return the server's time at *at*, a reading of `hours_on`."""
        if self._server_ahead_ns is None:
            self.ask_time()
        assert self._server_ahead_ns is not None, "ask_time sets it"
        return int(at * 1e9) + self._server_ahead_ns

    def has(self, ref: BlobRef, *, seconds: float = _YOUNG_SECONDS, counts_named: bool = True) -> bool:
        """Whether the bucket has *ref*, younger than *seconds* or, if *counts_named*, referenced by a record."""
        entry = self.bucket.look(self._repo.layout.object_name(ref.id))
        if entry is None or entry.size_bytes != ref.size_bytes:
            return False
        # The age first: it costs nothing, while `_is_named` may need to read all records of the bucket.
        return entry.modified_ns > self.server_ns(hours_on() - seconds) or (counts_named and self._is_named(ref.id))

    def _is_named(self, object_id: ObjectId) -> bool:
        with self._guard:
            # A record read half a day ago may since have been moved to the trash, which keeps its objects for a day.
            if hours_on() > self._refreshed_at + _YOUNG_SECONDS:
                began = hours_on()  # before the records are listed, since a listing is as old as its start
                self._refresh()
                self._refreshed_at = began
                for name in ("_blobs", "_needs"):
                    self.__dict__.pop(name, None)
            version = self._version_of.get(object_id)
            return object_id in self._blobs or version in self._blobs or object_id in self._needs

    @cached_property
    def _blobs(self) -> set[ObjectId]:
        """The version and state blobs that records reference. Pins do not count: they may be deleted at any time."""
        records = self._repo.records
        names = (name for run in records.runs() for name in records.names(run))
        commits = (commit for _, commit in records.each(names) if isinstance(commit, Commit))
        return {blob.id for commit in commits for blob in commit.record.blobs}

    @cached_property
    def _needs(self) -> Needs:
        """The objects that the newest commit of each run needs."""
        needs, catalog = Needs(self._repo), self._repo.catalog
        for run in catalog.runs():
            for row in catalog.view(run).visible[-1:]:
                needs.add_readable(catalog.commit(row.name).record)
        return needs


class _MemoryDraft:
    """The bytes of an object whose id is not known yet."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write *data* at *offset*, where the last write ended."""
        assert offset == len(self.data), "a draft has no gaps"
        self.data += data


class _MemoryBudget:
    """Limits the memory of uploads in flight; a single object may exceed it."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._taken = 0
        self._changed = threading.Condition()
        self._problem: Exception | None = None

    def take(self, size_bytes: int) -> None:
        """Wait until *size_bytes* fit; raises the error of an upload that failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._problem or not self._taken or self._taken + size_bytes <= self._size_bytes
            )
            self.check()
            self._taken += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Give *size_bytes* back."""
        with self._changed:
            self._taken -= size_bytes
            self._changed.notify_all()

    def fail(self, problem: Exception | None) -> None:
        """Make every waiting and future `take` raise *problem*; None clears it."""
        with self._changed:
            self._problem = problem
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether an upload has failed."""
        return self._problem is not None

    def check(self) -> None:
        """Raise the error of an upload that failed."""
        if self._problem is not None:
            raise self._problem


class BucketWriter(ObjectWriter):
    """Uploads one commit's objects as they arrive, unless the bucket already has them; blobs are uploaded last."""

    def __init__(self, reliance: Reliance, layout: Layout, files: Files, store: ObjectStore, **options: bool) -> None:
        super().__init__(layout, files, store, **options)
        self._reliance = reliance
        reliance.ask_time()
        # The time L in docs/internals/durability.md. Only collections that were at work after L can do harm; the part
        # must be written within `_WINDOW_SECONDS` of L, or everything is first looked up again.
        self._begun = self._looked_at = hours_on()
        self._budget = _MemoryBudget(REMOTE_FLIGHT_BYTES)
        self._pool = Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="save")
        self._in_flight: list[Future[None]] = []
        self._taken = set[ObjectId]()
        """Objects that were uploaded or are queued for upload."""
        self._blobs: list[tuple[BlobRef, Bytes]] = []
        """Held back until `publish`: a blob must not reference objects that are not uploaded yet."""

    @property
    def bytes_new(self) -> int:
        """How many bytes were uploaded; waits for uploads in flight."""
        self._wait()
        return self._bytes_new + sum(len(data) for _, data in self._blobs)

    @property
    def bytes_reused(self) -> int:
        """How many bytes were already in the bucket; waits for uploads in flight."""
        self._wait()
        return self._bytes_reused

    def put_back(self, ref: BlobRef) -> bool:
        """Whether the bucket has *ref*, and will keep it until this commit's record is written."""
        return self._reliance.has(ref)

    def claim(self, ref: BlobRef) -> bool:
        """Claim the version or state blob *ref* and everything that it references, for a record that inherits it."""
        if not self._reliance.has(ref):
            return False
        with self._guard:
            self._claimed[ref.id] = ref
        return True

    def unclaimed(self, refs: Sequence[BlobRef]) -> list[BlobRef]:
        """Claim *refs*, several at a time; return those that are gone."""
        return [ref for ref, is_there in zip(refs, self._pool.map(self.claim, refs), strict=True) if not is_there]

    def _is_sound(self, ref: BlobRef) -> bool | None:
        """Whether *ref*, read from the bucket, is sound; None if the bucket lacks it or may soon remove it."""
        if not self.put_back(ref):
            return None
        try:
            self.store.check_bytes(ref)
        except IntegrityError:
            return False
        return True

    @contextlib.contextmanager
    def draft(self) -> Iterator[Draft]:
        """Yield memory for the bytes of an object whose id becomes known only at the end."""
        yield _MemoryDraft()

    def keep(self, draft: Draft, ref: BlobRef) -> bool:
        """Upload *draft* as *ref* in the background, unless the bucket has it; return whether it was queued now."""
        assert isinstance(draft, _MemoryDraft), "it is a draft of ours"
        return self._upload(ref, draft.data)

    def put(self, data: Bytes, ref: BlobRef) -> None:
        """Upload the small object *data* as *ref*; version and state blobs wait until `publish`."""
        if bytes(data[: len(STATE_MAGIC)]) in {STATE_MAGIC, VERSION_MAGIC}:
            with self._guard:
                if ref.id not in self._taken:
                    self._taken.add(ref.id)
                    self._blobs.append((ref, bytes(data)))
        else:
            self._upload(ref, bytes(data))

    def _upload(self, ref: BlobRef, data: Bytes) -> bool:
        with self._guard:
            if self._is_over or ref.id in self._taken:
                return False
            self._taken.add(ref.id)
        self._submit(ref, data)
        return True

    def _submit(self, ref: BlobRef, data: Bytes) -> None:
        self._budget.take(ref.size_bytes)  # not under the lock, because it waits for uploads, which take the lock
        with self._guard:
            if self._is_over:
                self._budget.give_back(ref.size_bytes)
                return
            self._in_flight.append(self._pool.submit(self._send, ref, data))

    def _send(self, ref: BlobRef, data: Bytes) -> None:
        try:
            if not self._budget.has_failed and not self.spares_writing(ref):
                self._reliance.bucket.write(self._layout.object_name(ref.id), partial(_pieces, data))
                with self._guard:
                    self._staged[ref.id] = ref, self._layout.object(ref.id)
                    self._bytes_new += ref.size_bytes
        except Exception as exc:  # noqa: BLE001  # raised where somebody waits for the uploads
            self._budget.fail(exc.with_traceback(None))  # a traceback would keep the uploaded data in memory
        finally:
            self._budget.give_back(ref.size_bytes)

    def _wait(self) -> None:
        with self._guard:
            awaited = [*self._in_flight]
        wait(awaited)
        self._budget.check()

    @property
    def staged(self) -> Staged:
        """Return the objects that were uploaded or found in the bucket so far."""
        self._wait()
        return super().staged

    def publish(self) -> None:
        """
        Upload the blobs; make sure that the bucket has everything this commit relies on, and will keep it.

        Raises:
            Overtaken: A collection has removed something, or may be about to.
        """
        # All objects before the first blob: a blob in the bucket promises that everything it references exists.
        self._wait()
        for ref, data in self._blobs:
            self._submit(ref, data)
        self._blobs.clear()
        self._wait()
        # Look for marks once the objects are uploaded: a collection that begins later lists these objects as young.
        self._reliance.ask_time()
        is_collected = collected_since(self._reliance.bucket, self._reliance.server_ns(self._begun))
        if is_collected:
            time.sleep(2 * REMOTE_MOMENT_SECONDS)  # after this, that collection has removed what it had listed as old
        if is_collected or not self._is_in_time():
            self._looked_at = hours_on()
            for ref in self._lost(counts_named=True):
                raise Overtaken(
                    f"object {ref.id}, which was there before, was removed meanwhile; nothing was saved",
                    hint="try again",
                )

    def _is_in_time(self) -> bool:
        return hours_on() < self._looked_at + _WINDOW_SECONDS

    def _lost(self, *, counts_named: bool) -> list[BlobRef]:
        has = partial(self._reliance.has, seconds=_STILL_YOUNG_SECONDS, counts_named=counts_named)
        relied = (*(ref for ref, _ in self._staged.values()), *self._found, *self._claimed.values())
        answers = self._pool.map(has, relied)
        return [ref for ref, is_there in zip(relied, answers, strict=True) if not is_there]

    def look_again(self) -> list[BlobRef]:
        """Return the objects that may be gone, or may soon be, because this process was suspended; usually none."""
        # References do not count: the only one may be from our own record, and a collection may have listed the records
        # before ours existed.
        return [] if self._is_in_time() else self._lost(counts_named=False)

    def claimed_elsewhere(self) -> list[BlobRef]:
        """Return nothing: nothing is moved aside in a bucket."""
        return []

    def discard(self) -> None:
        """Drop objects that were not uploaded yet; the others stay for the next save, or until they are collected."""
        with self._guard:
            self._is_over = True  # before the pool ends: a later submit would raise
        self._pool.shutdown(cancel_futures=True)
        self._in_flight.clear()
        self._budget.fail(None)  # an error that was raised keeps the uploaded data in memory


def _pieces(data: Bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for at in range(0, len(view), IO_CHUNK_BYTES):
        yield view[at : at + IO_CHUNK_BYTES]


class BucketParts(PartStore):
    """The parts of unfinished saves, in the bucket; the bucket's collections remove those of dead jobs after a day."""

    def __init__(self, reliance: Reliance, layout: Layout, files: Files, *, store_id: str) -> None:
        super().__init__(layout, files, store_id=store_id)
        self._reliance = reliance
        self._bucket = reliance.bucket
        self._without_retries = reliance.bucket.without_retries()
        """
        For the end of a save: retries would delay the next save, and often all tries of an earlier request have failed.

        A failed request does no harm: nobody joins a leftover part, and `close_session` or a collection removes it. If
        a rank's failure cannot be written, the other ranks learn of it when ranks next exchange reports.
        """

    def open_session(self, session: str) -> None:
        """Do nothing: a bucket has no folders."""

    def sees_session(self, session: str) -> bool:
        """Return True: all ranks have opened the bucket by its URL and compared the store's id."""
        return True

    def ranks(self, session: str, save: int) -> set[int]:
        """
        Return the ranks that have written a part of *save*.

        Raises:
            Overtaken: A part is so old that a collection may soon remove objects that the part references.
        """
        ranks, pattern = set(), re.compile(rf"parts/{session}/{save}\.(\d{{1,9}})")
        old_ns = self._reliance.server_ns(hours_on() - _WINDOW_SECONDS)
        for entry in self._bucket.listed(f"parts/{session}"):
            if (match := pattern.fullmatch(entry.name)) is None:
                continue
            if entry.modified_ns < old_ns:
                raise Overtaken(
                    f"gc may remove the share of rank {match[1]}: the save was idle for too long",
                    hint="save again",
                )
            ranks.add(int(match[1]))
        return ranks

    def draft(self, part: Part) -> None:
        """Do nothing: a bucket's collections ignore parts; the objects in parts are young or referenced by a record."""

    def confirm(self, part: Part) -> None:
        """Make *part* visible; raises Overtaken if that took so long that a collection may remove its objects."""
        began = hours_on()
        self._publish(part, self._bucket)
        # The server dates the part when the part arrives, so a write that took hours would make old checks seem fresh.
        if hours_on() > began + _WINDOW_SECONDS / 6:
            self._bucket.remove([part_name(part.session, part.save, part.rank)])
            raise Overtaken("the process was suspended while it wrote its part", hint="save again")

    def publish(self, part: Part) -> None:
        """Make *part* visible unless it already exists; does not retry."""
        self._publish(part, self._without_retries)

    def _publish(self, part: Part, bucket: Bucket) -> None:
        if bucket.size(part_name(part.session, part.save, part.rank)) is not None:
            return  # it may already be joined, and writing it again would make it look younger
        data = seal_part(part, store_id=self._store_id)
        bucket.write(part_name(part.session, part.save, part.rank), lambda: [data])

    def find(self, session: str, save: int, rank: int) -> Part | None:
        """Return a part, None if it does not exist; raises IntegrityError if it is damaged."""
        name = part_name(session, save, rank)
        data = self._bucket.read(name, size_bytes_max=RECORD_BYTES_MAX)
        return None if data is None else unseal_part(data, name=name, store_id=self._store_id)

    def withdraw(self, session: str, save: int, rank: int) -> None:
        """Do nothing: there are no drafts."""

    def remove(self, session: str, save: int, *, world_size: int) -> None:
        """Remove the parts of a save that was committed or given up; does not retry."""
        self._without_retries.remove([part_name(session, save, rank) for rank in range(world_size)])

    def close_session(self, session: str, *, is_over: bool) -> None:
        """Remove what is left of *session* if it *is_over*."""
        if is_over:
            self._bucket.remove([entry.name for entry in self._bucket.listed(f"parts/{session}")])
