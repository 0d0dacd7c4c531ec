"""
Push: what a bucket lacks of a store goes there, objects first, then version and state blobs, then records, pins last.

So a record in the bucket means that all it names is there, however often a push is killed, and whoever else pushes.
Nothing rests on conditional writes: objects are named by their content, and records never change.
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

from layerstore.errors import AlreadyExists, IntegrityError, LayerstoreError, StorageIO
from layerstore.format import NameHasher, unseal_pin
from layerstore.history import Needs, PushedNotice, Resolved, named_by, note_pushed, references_to
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
from layerstore.remote.bucket import (
    COLLECTIONS_AT_WORK,
    COLLECTIONS_ENDED,
    Bucket,
    Listed,
    RemoteNotice,
    hours_on,
    in_parallel,
)
from layerstore.remote.identity import claim, pushed_records
from layerstore.shares import cut
from layerstore.storage import RecordName, Repository, check_hash, read_chunks

# Servers tell whole seconds.
_CLOCK_NS = 2 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push has sent."""

    url: str
    commits: tuple[str, ...]
    """References of those that the remote did not have."""
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
    progress: Progress,
) -> Pushed:
    """
    Send what *bucket* lacks of *refs*, or of every visible commit and pin, of *runs* or of all.

    Once a commit is told as sent, the remote has it whole. After a kill, a repetition sends only what is left.
    A pin that means something else there is left alone, unless the push *moves pins*.

    Raises:
        Conflict: The bucket holds another store.
        AlreadyExists: A pin there means something else; all else was sent.
        IntegrityError: Something that was to be sent is damaged or missing here; all else was sent.
    """
    made = claim(bucket, repo.identity)
    pushes = _Push(repo, bucket, progress, moves_pins=moves_pins)
    pushed = pushes.run(*_asked(repo, refs, runs), made=made)
    raise_left(pushes.left, "sent")
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
    Push, and push again what comes, until *stop* is set; yield what each push has sent, the first one's in any case.

    *refs* is asked each time. While the server does not answer, a warning says so, and the next push tries again.
    A warning also names what cannot be sent, once; all else is.

    Raises:
        StorageIO: The server refuses the key, or is full.
    """
    pushes, is_first, made = _Push(repo, bucket, progress, moves_pins=moves_pins), True, False
    warned = ""
    while not stop.is_set():
        try:
            if is_first:
                made = claim(bucket, repo.identity) or made
            pushed = pushes.run(*_asked(repo, refs()), made=made)
        except StorageIO as exc:
            if (exc.errno, exc.filename) != (errnos.EIO, bucket.url):
                raise
            # What has arrived is found out anew.
            pushes = _Push(repo, bucket, progress, moves_pins=moves_pins)
            warnings.warn(f"{exc}; trying again in {FOLLOW_SECONDS:.0f} s", RemoteNotice, stacklevel=2)
        else:
            problem = str(_problem_of(pushes.left, "sent") or "")
            if problem and problem != warned:
                warnings.warn(problem, RemoteNotice, stacklevel=2)
            warned = problem
            if is_first or pushed.commits or pushed.pins:
                yield pushed
            is_first = False
        progress.start("", 0)  # nothing is under way
        stop.wait(FOLLOW_SECONDS)


Left = dict[str, LayerstoreError]
"""What was not sent or fetched, by what it is called, and why."""


def raise_left(left: Left, what: str) -> None:
    """Raise what is wrong with the first of *left*, and name them all: *what* was not done with them."""
    problem = _problem_of(left, what)
    if problem is not None:
        raise problem


def _problem_of(left: Left, what: str) -> LayerstoreError | None:
    for first in left.values():
        problem = type(first)(f"{first}; not {what}: {', '.join(left)}; all else was", hint=first.hint, **first.facts)
        problem.__cause__ = first
        return problem
    return None


def _asked(
    repo: Repository, refs: Iterable[Resolved] | None, runs: Iterable[str] | None = None
) -> tuple[list[RecordName], list[Pin], Left]:
    if refs is not None:
        resolved = list(refs)
        named = [repo.records.read_pin(each.pin) for each in resolved if each.pin is not None]
        names = [RecordName(each.record.run, each.record.step, each.commit) for each in resolved if not each.pin]
        return names, named, {}
    wanted = repo.catalog.runs() if runs is None else list(runs)
    views = [repo.catalog.find(run) for run in wanted]
    found = [view for view in views if view is not None]
    left: Left = {}
    pins = []
    for called, pin in repo.records.pins():
        if isinstance(pin, Pin):
            pins += [pin] if runs is None or pin.record.run in wanted else []
        elif runs is None:
            left[f"pin {called}"] = pin
    return [name for view in found for name in (*(row.name for row in view.visible), *view.damaged)], pins, left


_Wanted = tuple[Path, CommitRecord]
"""A record that is to be sent, or a pin's, and its file."""


class _Push:
    """
    One push.

    What the bucket has, but no record of ours that it also has names, may be on its way out: a collection there removes
    what is old and unnamed. So anything of that kind that is half as old is sent again, the listing is made anew before
    it is half a day old, and what a collection that is at work may have listed before is looked at once it has removed.
    """

    def __init__(self, repo: Repository, bucket: Bucket, progress: Progress, *, moves_pins: bool) -> None:
        self._repo = repo
        self._bucket = bucket
        self._progress = progress
        self._moves_pins = moves_pins
        self._own: set[RecordName] = set()
        """Records that this push sends."""
        self._common: list[CommitRecord] = []
        """Records that the bucket has: all that they name is there."""
        self._common_blobs: set[ObjectId] = set()
        self._named: Needs | None = None
        self._listed: dict[str, Listed] = {}
        self._listed_ns = self._old_before_ns = 0
        """By the server's clock."""
        self._list_again_at = 0.0
        self._sent: set[ObjectId] = set()
        self._unnamed: dict[ObjectId, BlobRef] = {}
        """What it counts on since the last listing, sent or young, that no record in the bucket names."""
        self.left: Left = {}
        """What the last run could not send."""
        self._made = False
        self._objects = 0
        self._bytes_sent = 0

    def run(self, names: Sequence[RecordName], pins: Sequence[Pin], left: Left, *, made: bool) -> Pushed:
        """
        Send the records *names* and *pins* with all that they name; `left` is what was *left* already, or cannot be.

        *made* says that the bucket was empty: two stores may have found that in one moment.
        """
        self.left, self._made = dict(left), made
        layout, there = self._repo.layout, pushed_records(self._repo, self._bucket)
        names = [name for name in names if name not in there]
        self._own.update(names)
        commits = dict(self._read(names))
        for name in names:
            if name not in commits and f"{name.run}@{name.step}" not in self.left:
                _tell_gone(name.run, name.step)
        pins = [pin for pin in pins if not self._has_or_leaves(pin)]
        paths = {layout.record(name.run, name.step, name.id): name for name in commits}
        waiting = deque(zip(paths, commits.values(), strict=True))
        waiting += ((layout.pin(pin.name), pin.record) for pin in pins)
        if waiting:
            if self._is_stale():
                self._list()
            wanted, seen = list[BlobRef](), set(self._sent)
            waiting = deque(self._still_here(waiting, lambda _, record: wanted.extend(self._missing(record, seen))))
            self._progress.start("push", sum(ref.size_bytes for ref in wanted))
        sent = set[Path]()
        with ThreadPoolExecutor(REMOTE_REQUESTS_MAX, thread_name_prefix="push") as pool:
            while waiting:
                sent.update(path for path, _ in self._send(pool, waiting))
        names = [name for path, name in paths.items() if path in sent]
        try:
            note_pushed(self._repo, self._bucket.url, {name.id for name in (*there, *names)})
        except StorageIO as exc:  # a store that may not be written
            warnings.warn(f"what was pushed is not noted here: {exc}", PushedNotice, stacklevel=2)
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
        """Yield the records *names*, but for those that a collection has removed here, and damaged ones."""
        for name, commit in self._repo.records.each(names):
            if isinstance(commit, Commit):
                yield name, commit.record
            elif not isinstance(commit, IntegrityError):
                raise commit
            elif name in self._own:
                self.left[f"{name.run}@{name.step}"] = commit

    def _has_or_leaves(self, pin: Pin) -> bool:
        try:
            return self._has_pin(pin)
        except (AlreadyExists, IntegrityError) as exc:
            self.left[f"pin {pin.name}"] = exc
            return True

    def _has_pin(self, pin: Pin) -> bool:
        """Whether the bucket has *pin*; raises AlreadyExists if it means something else there, and is not moved."""
        called = self._repo.layout.name(self._repo.layout.pin(pin.name))
        data = self._bucket.read(called, size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            return False
        try:
            theirs = unseal_pin(data, name=called, store_id=self._repo.identity.store_id)
        except IntegrityError as exc:
            raise IntegrityError(
                f"{self._bucket.url}: {exc}", hint=f"layerstore repair --remote {typed(self._bucket.url)} puts it back"
            ) from exc
        if (theirs.record, theirs.base) == (pin.record, pin.base):
            return True
        if self._moves_pins:
            return False
        raise AlreadyExists(
            f"pin {pin.name!r} means {theirs.record.run}@{theirs.record.step} in {self._bucket.url}, and something "
            "else here",
            hint=f"layerstore push --move-pins moves it there; layerstore pin --delete {typed(pin.name)} removes the "
            "one here",
        )

    # -- what is missing -----------------------------------------------------------------------------------------

    def _list(self) -> None:
        """Find out what the bucket has; this is good for half a grace."""
        self._list_again_at = hours_on() + REMOTE_GRACE_SECONDS / 2
        self._listed_ns = self._bucket.now_ns()
        self._old_before_ns = self._listed_ns - int(REMOTE_GRACE_SECONDS / 2 * 1e9)
        there = (name for name in pushed_records(self._repo, self._bucket) if name not in self._own)
        self._common = [record for _, record in self._read(there)]
        self._common_blobs = {blob.id for record in self._common for blob in record.blobs}
        self._named = None
        self._listed = {each.name: each for each in self._bucket.objects()}
        self._sent.clear()
        self._unnamed.clear()

    def _missing(self, record: CommitRecord, seen: set[ObjectId]) -> list[BlobRef]:
        """Return what has to be sent of *record* and is not *seen* yet, each blob after all that it names."""
        found = []
        for blob in record.blobs:
            if blob.id in seen:
                continue
            is_common = blob.id in self._common_blobs
            for ref in (*named_by(self._repo, blob), blob):
                if ref.id not in seen and not self._has(ref, is_common=is_common):
                    found.append(ref)
                seen.add(ref.id)
        return found

    def _has(self, ref: BlobRef, *, is_common: bool) -> bool:
        """Whether the bucket has *ref*, and keeps it; what *is common* a record there names."""
        listed = self._listed.get(self._repo.layout.object_name(ref.id))
        if listed is None or listed.size_bytes != ref.size_bytes:
            return False
        if is_common or ref.id in self._needs_of_common():
            return True
        if listed.modified_ns < self._old_before_ns:
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
        Send the first record of *waiting* after all that it names; return it, unless it was collected here meanwhile.

        Beside a collection of the bucket send all that wait, so that they need one look together.
        """
        group = [waiting.popleft()]
        while group:
            if self._is_stale():
                self._list()
            group = self._still_here(group, lambda _, record: self._send_objects(pool, record))
            if self._is_stale():
                continue
            if self._is_collected():
                if waiting:
                    group += waiting
                    waiting.clear()
                    continue
                if not self._are_there():
                    self._list_again_at = 0.0
                    continue
            if self._made:
                claim(self._bucket, self._repo.identity)
                self._made = False
            group = self._still_here(group, self._send_record)
            if not self._is_stale():  # suspended before a record, it may have lost what that counts on
                self._unnamed.clear()  # these records name it
                break
        return group

    def _still_here(self, group: Iterable[_Wanted], do: Callable[[Path, CommitRecord], None]) -> list[_Wanted]:
        """*Do* something with each of *group*; return those that were neither collected here meanwhile nor damaged."""
        found = []
        for path, record in group:
            try:
                do(path, record)
                found.append((path, record))
            except (IntegrityError, AlreadyExists, StorageIO) as exc:
                if not self._repo.files.exists(path):
                    _tell_gone(record.run, record.step)
                elif isinstance(exc, StorageIO):
                    raise
                else:
                    self.left[f"pin {path.name}" if self._is_pin(path) else f"{record.run}@{record.step}"] = exc
                self._list_again_at = 0.0  # what was sent of it, no record names
        return found

    def _send_objects(self, pool: ThreadPoolExecutor, record: CommitRecord) -> None:
        blobs, seen = {blob.id for blob in record.blobs}, set(self._sent)
        missing = self._missing(record, seen)
        for which in (False, True):  # nothing names an object that is not there yet
            self._send_shares(pool, [ref for ref in missing if (ref.id in blobs) is which])
        self._sent |= seen

    def _is_pin(self, path: Path) -> bool:
        return path.parent == self._repo.layout.pins

    def _send_record(self, path: Path, _: CommitRecord) -> None:
        if self._is_pin(path) and self._has_pin(self._repo.records.read_pin(path.name)):
            return  # somebody else has sent it meanwhile
        data = self._repo.files.read(path, size_bytes_max=RECORD_BYTES_MAX)
        self._bucket.write(self._repo.layout.name(path), lambda: [data])
        self._bytes_sent += len(data)

    def _is_collected(self) -> bool:
        """Whether a collection of the bucket may have been at work since it was listed."""
        at_work, ended = map(self._bucket.listed, (COLLECTIONS_AT_WORK, COLLECTIONS_ENDED))
        return any(each.modified_ns >= self._old_before_ns for each in at_work) or any(
            each.modified_ns >= self._listed_ns - _CLOCK_NS for each in ended
        )

    def _are_there(self) -> bool:
        """Look at what no record names yet, when whoever had listed it as old has removed that."""
        self._progress.start("objects looked at beside a collection", len(self._unnamed))
        time.sleep(2 * REMOTE_MOMENT_SECONDS)
        with ThreadPoolExecutor(REMOTE_REQUESTS_MAX, thread_name_prefix="look") as pool:
            sizes = pool.map(self._bucket.size, [self._repo.layout.object_name(name) for name in self._unnamed])
            return all(size == ref.size_bytes for size, ref in zip(sizes, self._unnamed.values(), strict=True))

    def _is_stale(self) -> bool:
        return hours_on() > self._list_again_at

    def _send_shares(self, pool: ThreadPoolExecutor, refs: Sequence[BlobRef]) -> None:
        """Send *refs*, in shares."""
        shares = self._repo.shares
        mine, *theirs = (refs[of.start : of.stop] for of in cut([ref.size_bytes for ref in refs], count=shares.count))
        with shares.asked(self._repo, send_share, [(self._bucket.url, part) for part in theirs]) as answers:
            in_parallel(pool, self._send_object, mine)
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
    """Send some objects to the bucket at a URL for the process that leads."""
    url, refs = part
    with ThreadPoolExecutor(REMOTE_REQUESTS_MAX, thread_name_prefix="push") as pool:
        in_parallel(pool, partial(send_object, repo, Bucket(url)), refs)
    yield


def send_object(repo: Repository, bucket: Bucket, ref: BlobRef) -> None:
    """Send one object."""
    bucket.write(repo.layout.object_name(ref.id), partial(chunks_of, repo, ref))


def _tell_gone(run: str, step: int) -> None:
    warnings.warn(f"{run}@{step} was removed here meanwhile, and is not sent", PushedNotice, stacklevel=2)


def chunks_of(repo: Repository, ref: BlobRef) -> Iterator[memoryview]:
    """Yield the bytes of *ref*; raises IntegrityError at their end if they are not what its name says."""
    hasher = NameHasher()
    with repo.objects.open(ref) as file:
        for data in read_chunks(file):
            hasher.update(data)
            yield data
    check_hash(ref, hasher)
