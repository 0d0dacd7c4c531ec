"""
Push everything that a bucket lacks: objects first, then version and state blobs, then records, pins last.

So if the bucket has a record, it has everything that the record references, even if pushes are killed or overlap.
Nothing depends on conditional writes: an object's id is the hash of its content, and records never change.
"""

import errno as errnos
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

from layerstore.disk import hours_on
from layerstore.errors import AlreadyExists, IntegrityError, LayerstoreError, NotFound, StorageIO
from layerstore.format import unseal_pin
from layerstore.hashing import NameHasher
from layerstore.history import Needs, PushedNotice, Resolved, named_by, note_pushed, pushed_to, references_to
from layerstore.layers import typed
from layerstore.limits import (
    FOLLOW_SECONDS,
    RECORD_BYTES_MAX,
    REMOTE_GRACE_SECONDS,
    REMOTE_MOMENT_SECONDS,
    REMOTE_REQUESTS_MAX,
)
from layerstore.model import BlobRef, Commit, CommitRecord, ObjectId, Pin
from layerstore.progress import Progress
from layerstore.remote.bucket import Bucket, RemoteNotice
from layerstore.remote.identity import Inventory, claim, collected_since, pushed_records
from layerstore.shares import cut
from layerstore.storage import RecordName, Repository, check_hash, read_chunks
from layerstore.threads import Threads, run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """The result of a push."""

    url: str
    commits: tuple[str, ...]
    """References of the commits that the remote lacked wholly or partly."""
    pins: tuple[str, ...]
    objects: int
    bytes_sent: int


def push(
    repo: Repository,
    bucket: Bucket,
    *,
    refs: Iterable[Resolved] | None,
    runs: Iterable[str] | None = None,
    moves_pins: bool = False,
    compares: bool = True,
    progress: Progress,
) -> Pushed:
    """
    Send what *bucket* lacks of *refs* or, without *refs*, of all visible commits and pins of *runs*, or of all runs.

    Once a commit is reported as sent, the remote has all of it. After a kill, a repeated push sends only the rest.
    If the remote already has some of the commits, or if there are pins to send, the remote's objects are listed and
    their sizes compared, and objects that it has lost are sent again. Without *compares*, the remote's commits are
    assumed complete, and only new commits cost requests.
    A pin that refers to something else in the remote is left unchanged, unless *moves_pins* is set.
    """
    made = claim(bucket, repo.identity)
    pushes = _Push(repo, bucket, progress, moves_pins=moves_pins)
    pushed = pushes.run(*_requested(repo, refs, runs), made=made, compares=compares)
    raise_failures(pushes.failures, "sent")
    return pushed


def follow(
    repo: Repository,
    bucket: Bucket,
    *,
    refs: Callable[[], Iterable[Resolved] | None],
    moves_pins: bool = False,
    stop: Event,
    progress: Progress,
) -> Iterator[Pushed]:
    """
    Push, then keep pushing new commits until *stop* is set; yield the first result, and later ones with something sent.

    *refs* is called before each push.
    """
    pushes, is_first, made = _Push(repo, bucket, progress, moves_pins=moves_pins), True, False
    warned = ""
    while not stop.is_set():
        try:
            if is_first:
                made = claim(bucket, repo.identity) or made
            pushed = pushes.run(*_requested(repo, refs()), made=made)
        except StorageIO as exc:
            if (exc.errno, exc.filename) != (errnos.EIO, bucket.url):
                raise
            # Start a new push, which lists again: we do not know what arrived.
            pushes = _Push(repo, bucket, progress, moves_pins=moves_pins)
            warnings.warn(f"{exc}; trying again in {FOLLOW_SECONDS:.0f} s", RemoteNotice, stacklevel=2)
        else:
            problem = str(_problem_of(pushes.failures, "sent") or "")
            if problem and problem != warned:
                warnings.warn(problem, RemoteNotice, stacklevel=2)
            warned = problem
            if is_first or pushed.commits or pushed.pins:
                yield pushed
            is_first = False
        progress.start("", 0)  # idle
        stop.wait(FOLLOW_SECONDS)


Failures = dict[str, LayerstoreError]
"""The commits and pins that were not sent or fetched, by name, and why."""


def raise_failures(failures: Failures, what: str) -> None:
    """Raise the first of *failures*, if any; its message lists all names as not *what*, such as "not sent"."""
    problem = _problem_of(failures, what)
    if problem is not None:
        raise problem


def _problem_of(failures: Failures, what: str) -> LayerstoreError | None:
    for first in failures.values():
        names = ", ".join(failures)
        problem = type(first)(f"{first}; not {what}: {names}; everything else was", hint=first.hint, **first.facts)
        problem.__cause__ = first
        return problem
    return None


def _requested(
    repo: Repository, refs: Iterable[Resolved] | None, runs: Iterable[str] | None = None
) -> tuple[list[RecordName], list[Pin], Failures]:
    if refs is not None:
        resolved = list(refs)
        pinned = [repo.records.read_pin(ref.pin) for ref in resolved if ref.pin is not None]
        names = [RecordName(ref.record.run, ref.record.step, ref.commit) for ref in resolved if not ref.pin]
        return names, pinned, {}
    wanted = repo.catalog.runs() if runs is None else list(runs)
    views = [view for run in wanted if (view := repo.catalog.find(run)) is not None]
    failures: Failures = {}
    pins = []
    for name, pin in repo.records.pins():
        if isinstance(pin, Pin):
            pins += [pin] if runs is None or pin.record.run in wanted else []
        elif runs is None:
            failures[f"pin {name}"] = pin
    return [name for view in views for name in (*(row.name for row in view.visible), *view.damaged)], pins, failures


_Wanted = tuple[Path, CommitRecord]
"""The file of a record or pin to send, and the record."""


class _Push:
    """
    One push.

    An object in the bucket is safe if one of this store's records in the bucket references it. A collection may remove
    any other object that is a day old. So we send such an object again once it is half a day old, and list again before
    a listing is half a day old. During a collection, we check our objects once it has removed what it had listed.
    """

    def __init__(self, repo: Repository, bucket: Bucket, progress: Progress, *, moves_pins: bool) -> None:
        self._repo = repo
        self._bucket = bucket
        self._progress = progress
        self._moves_pins = moves_pins
        self._own: set[RecordName] = set()
        """The records that this push sends."""
        self._common: list[CommitRecord] = []
        """The records in the bucket at the last listing, except this push's own; the objects in them are safe."""
        self._common_blobs: set[ObjectId] = set()
        self._named: Needs | None = None
        self._inventory = Inventory(repo, bucket, lists=False)
        self._listed_ns = self._old_before_ns = 0
        """Times by the server's clock."""
        self._list_again_at = 0.0
        self._sent: set[ObjectId] = set()
        self._unnamed: dict[ObjectId, BlobRef] = {}
        """Objects that this push relies on, sent since the last listing or young; no record in the bucket has them."""
        self.failures: Failures = {}
        """The failures of the last `run`."""
        self._made = False
        self._objects = 0
        self._bytes_sent = 0

    def run(
        self, names: Sequence[RecordName], pins: Sequence[Pin], failures: Failures, *, made: bool, compares: bool = True
    ) -> Pushed:
        """
        Send the records *names* and *pins* with everything that they reference.

        Afterwards, `failures` holds *failures* and those of this run. *made* means that this push made the bucket a
        remote, as another store may have done at the same time. With *compares*, the first run also checks the commits
        that the bucket already has.
        """
        self.failures, self._made = dict(failures), made
        # Read before anything is sent, so that notes that another push makes in the meantime are kept.
        before = pushed_to(self._repo).get(self._bucket.url, frozenset())
        layout, there = self._repo.layout, pushed_records(self._repo, self._bucket)
        new = [name for name in names if name not in there]
        self._own.update(new)
        commits = dict(self._read(new))
        for name in new:
            if name not in commits and f"{name.run}@{name.step}" not in self.failures:
                _warn_removed(name.run, name.step)
        is_first = compares and not self._listed_ns and bool(there.intersection(names) or pins)
        if is_first:
            self._begin(lists=True)
            commits |= self._incomplete(there.intersection(names), new=commits.values())
        pins = [pin for pin in pins if not self._is_settled(pin, is_first=is_first)]
        paths = {layout.record(name.run, name.step, name.id): name for name in names if name in commits}
        waiting = deque((path, commits[name]) for path, name in paths.items())
        waiting += ((layout.pin(pin.name), pin.record) for pin in pins)
        if waiting:
            if self._is_stale():
                self._begin()
            wanted, seen = list[BlobRef](), set(self._sent)
            waiting = deque(self._process_each(waiting, lambda _, record: wanted.extend(self._missing(record, seen))))
            self._progress.start("push", sum(ref.size_bytes for ref in wanted))
        sent = set[Path]()
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="push") as pool:
            while waiting:
                sent.update(path for path, _ in self._send(pool, waiting))
        names = [name for path, name in paths.items() if path in sent]
        has = {name.id for name in (*there.difference(commits), *names)}
        note_pushed(self._repo, self._bucket.url, has, before=before)
        pushed = Pushed(
            url=self._bucket.url,
            commits=tuple(references_to(self._repo, [commits[name] for name in names])),
            pins=tuple(pin.name for pin in pins if layout.pin(pin.name) in sent),
            objects=self._objects,
            bytes_sent=self._bytes_sent,
        )
        self._objects = self._bytes_sent = 0
        return pushed

    def _read(self, names: Iterable[RecordName]) -> Iterator[tuple[RecordName, CommitRecord]]:
        """Yield the records *names*, except damaged ones and those that a local collection has removed."""
        for name, commit in self._repo.records.each(names):
            if isinstance(commit, Commit):
                yield name, commit.record
            elif not isinstance(commit, IntegrityError):
                raise commit
            elif name in self._own:
                self.failures[f"{name.run}@{name.step}"] = commit

    def _incomplete(
        self, names: Iterable[RecordName], *, new: Iterable[CommitRecord]
    ) -> dict[RecordName, CommitRecord]:
        """Return those of the records *names*, all in the bucket, that reference an object which the bucket lacks."""
        incomplete, needs = {}, Needs(self._repo)
        # Objects that *new* records need may be missing, since these records are yet to be sent.
        for record in new:
            needs.add_readable(record)
        # Reading the blobs of thousands of commits takes minutes; usually the bucket has all objects of this store.
        self._inventory.nothing_is_lost = self._inventory.has_all_here(besides=needs)
        for name, record in self._read(sorted(names)):
            try:
                if not self._inventory.has_all_of(record):
                    incomplete[name] = record
            except (IntegrityError, NotFound) as exc:  # damaged locally, so the objects that it needs are unknown
                self.failures[f"{name.run}@{name.step}"] = exc
        return incomplete

    def _is_settled(self, pin: Pin, *, is_first: bool) -> bool:
        """Whether *pin* need not be sent; on the first pass, the bucket must also have all of its objects."""
        try:
            return self._has_pin(pin) and (not is_first or self._inventory.has_all_of(pin.record))
        except (AlreadyExists, IntegrityError) as exc:
            self.failures[f"pin {pin.name}"] = exc
            return True

    def _has_pin(self, pin: Pin) -> bool:
        """Whether the bucket has *pin*; raises AlreadyExists if its pin differs and must not be moved."""
        name = self._repo.layout.name(self._repo.layout.pin(pin.name))
        data = self._bucket.read(name, size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            return False
        try:
            theirs = unseal_pin(data, name=name, store_id=self._repo.identity.store_id)
        except IntegrityError as exc:
            raise IntegrityError(
                f"{self._bucket.url}: {exc}", hint=f"layerstore repair --remote {typed(self._bucket.url)} puts it back"
            ) from exc
        if (theirs.record, theirs.base) == (pin.record, pin.base):
            return True
        if self._moves_pins:
            return False
        raise AlreadyExists(
            f"pin {pin.name!r} refers to {theirs.record.run}@{theirs.record.step} in {self._bucket.url}, but to "
            "something else here",
            hint=f"layerstore push --move-pins moves it there; layerstore pin --delete {typed(pin.name)} removes the "
            "one here",
        )

    # -- what is missing -----------------------------------------------------------------------------------------

    def _begin(self, *, lists: bool = False) -> None:
        """List the bucket's records and, with *lists*, its objects; the listing is valid for half a grace."""
        # Both clocks are read before anything is listed, so a slow listing is only valid for a shorter time.
        self._list_again_at = hours_on() + REMOTE_GRACE_SECONDS / 2
        self._listed_ns = self._bucket.now_ns()
        self._old_before_ns = self._listed_ns - int(REMOTE_GRACE_SECONDS / 2 * 1e9)
        # Records that this push sent make no objects safe: a collection may already have been removing the objects.
        there = (name for name in pushed_records(self._repo, self._bucket) if name not in self._own)
        self._common = [record for _, record in self._read(there)]
        self._common_blobs = {blob.id for record in self._common for blob in record.blobs}
        self._named = None
        self._inventory = Inventory(self._repo, self._bucket, lists=lists)
        self._sent.clear()
        self._unnamed.clear()

    def _missing(self, record: CommitRecord, seen: set[ObjectId]) -> list[BlobRef]:
        """Return the objects of *record* that are missing and not in *seen*, each blob after what it references."""
        self._inventory.look_for([blob for blob in record.blobs if blob.id in self._common_blobs])
        new: dict[BlobRef, bool] = {}
        for blob in record.blobs:
            if blob.id not in seen:
                is_common = blob.id in self._common_blobs
                for ref in (*self._doubtful(blob, is_common=is_common), blob):
                    new[ref] = new.get(ref, False) or is_common
        new = {ref: is_common for ref, is_common in new.items() if ref.id not in seen}
        blobs = {blob.id for blob in record.blobs}
        self._inventory.look_for_new(sorted(new, key=lambda ref: ref.id in blobs))  # in the order of sending
        seen.update(ref.id for ref in new)
        return [ref for ref, is_common in new.items() if not self._has(ref, is_common=is_common)]

    def _doubtful(self, blob: BlobRef, *, is_common: bool) -> Sequence[BlobRef]:
        """
        Return the objects that *blob* references, unless this push relies on them without looking them up.

        If the bucket has a blob and a record that references it, the blob was sent after its objects; saves to a bucket
        rely on this order, too. With a listing, looking up the objects costs nothing.
        """
        is_relied_on = is_common and not self._inventory.is_listed and self._inventory.find(blob) is not None
        return () if is_relied_on else named_by(self._repo, blob)

    def _has(self, ref: BlobRef, *, is_common: bool) -> bool:
        """Whether the bucket has *ref* and will keep it; *is_common*: a record in the bucket references *ref*."""
        entry = self._inventory.find(ref)
        if entry is None:
            return False
        if is_common or ref.id in self._needs_of_common():
            return True
        if entry.modified_ns < self._old_before_ns:
            return False
        self._unnamed[ref.id] = ref
        return True

    def _needs_of_common(self) -> Needs:
        if self._named is None:
            self._named = Needs(self._repo)
            for record in self._common:
                self._named.add_readable(record)
        return self._named

    # -- sending -------------------------------------------------------------------------------------------------

    def _send(self, pool: ThreadPoolExecutor, waiting: deque[_Wanted]) -> list[_Wanted]:
        """
        Send the first of *waiting*, after everything it references; return it unless it failed or was removed locally.

        While the bucket is being collected, send and return all of *waiting*, so that one check covers them all.
        """
        group = [waiting.popleft()]
        while group:
            if self._is_stale():
                self._begin()
            group = self._process_each(group, lambda _, record: self._send_objects(pool, record))
            # Send records only if the listing is still valid and no later collection has removed our objects.
            if self._is_stale():
                continue
            if collected_since(self._bucket, self._listed_ns):
                if waiting:
                    group += waiting
                    waiting.clear()
                    continue
                if not self._are_there():
                    self._list_again_at = 0.0
                    continue
            # Right before the first record: another store may have claimed the same prefix at the same moment.
            if self._made:
                claim(self._bucket, self._repo.identity)
                self._made = False
            group = self._process_each(group, self._send_record)
            if not self._is_stale():  # otherwise we were suspended before sending a record, and its objects may be gone
                self._unnamed.clear()  # the records sent now reference them
                break
        return group

    def _process_each(self, group: Iterable[_Wanted], do: Callable[[Path, CommitRecord], None]) -> list[_Wanted]:
        """Call *do* for each of *group*; return those that neither failed nor were removed locally in the meantime."""
        done = []
        for path, record in group:
            try:
                do(path, record)
                done.append((path, record))
            except (IntegrityError, AlreadyExists, StorageIO) as exc:
                if not self._repo.files.exists(path):
                    _warn_removed(record.run, record.step)
                elif isinstance(exc, StorageIO):
                    raise
                else:
                    self.failures[f"pin {path.name}" if self._is_pin(path) else f"{record.run}@{record.step}"] = exc
                self._list_again_at = 0.0  # list again: no record will keep the objects already sent for *record*
        return done

    def _send_objects(self, pool: ThreadPoolExecutor, record: CommitRecord) -> None:
        blobs, seen = {blob.id for blob in record.blobs}, set(self._sent)
        missing = self._missing(record, seen)
        for sends_blobs in (False, True):  # blobs last: they must not reference objects that are yet to be sent
            self._send_shares(pool, [ref for ref in missing if (ref.id in blobs) is sends_blobs])
        self._sent |= seen

    def _is_pin(self, path: Path) -> bool:
        return path.parent == self._repo.layout.pins

    def _send_record(self, path: Path, _: CommitRecord) -> None:
        if self._is_pin(path) and self._has_pin(self._repo.records.read_pin(path.name)):
            return  # another process has sent it in the meantime
        data = self._repo.files.read(path, size_bytes_max=RECORD_BYTES_MAX)
        self._bucket.write(self._repo.layout.name(path), lambda: [data])
        self._bytes_sent += len(data)

    def _are_there(self) -> bool:
        """Whether the objects in `_unnamed` still exist once running collections have removed what they had listed."""
        self._progress.start("objects checked during a collection", len(self._unnamed))
        time.sleep(2 * REMOTE_MOMENT_SECONDS)
        with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="look") as pool:
            sizes = pool.map(self._bucket.size, [self._repo.layout.object_name(name) for name in self._unnamed])
            return all(size == ref.size_bytes for size, ref in zip(sizes, self._unnamed.values(), strict=True))

    def _is_stale(self) -> bool:
        return hours_on() > self._list_again_at

    def _send_shares(self, pool: ThreadPoolExecutor, refs: Sequence[BlobRef]) -> None:
        """Send *refs*, split among the processes."""
        shares = self._repo.shares
        parts = cut([ref.size_bytes for ref in refs], count=shares.count)
        mine, *theirs = (refs[part.start : part.stop] for part in parts)
        with shares.scatter_work(self._repo, send_share, [(self._bucket.url, part) for part in theirs]) as answers:
            run_all(pool, self._send_object, mine)
            answers()
        for part in theirs:
            for ref in part:
                self._note_sent(ref)

    def _send_object(self, ref: BlobRef) -> None:
        send_object(self._repo, self._bucket, ref)
        self._note_sent(ref)

    def _note_sent(self, ref: BlobRef) -> None:
        self._unnamed[ref.id] = ref
        self._objects += 1
        self._bytes_sent += ref.size_bytes
        self._progress.advance(ref.size_bytes)


@contextmanager
def send_share(repo: Repository, part: tuple[str, Sequence[BlobRef]]) -> Iterator[None]:
    """Send some objects to the bucket at a URL on behalf of the leading process."""
    url, refs = part
    with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="push") as pool:
        run_all(pool, partial(send_object, repo, Bucket(url)), refs)
    yield


def send_object(repo: Repository, bucket: Bucket, ref: BlobRef) -> None:
    """Send one object."""
    bucket.write(repo.layout.object_name(ref.id), partial(chunks_of, repo, ref))


def _warn_removed(run: str, step: int) -> None:
    warnings.warn(f"{run}@{step} was removed here during the push, and is not sent", PushedNotice, stacklevel=2)


def chunks_of(repo: Repository, ref: BlobRef) -> Iterator[memoryview]:
    """Yield the bytes of *ref*; raises IntegrityError at the end unless they match the id."""
    hasher = NameHasher()
    with repo.objects.open(ref) as file:
        for data in read_chunks(file):
            hasher.update(data)
            yield data
    check_hash(ref, hasher)
