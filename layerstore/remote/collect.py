"""
Collect a remote: move records that retention does not keep to the trash, and remove unreferenced objects a day later.

The rule is that of a local store, but ages are measured by the server's clock, and a grace of a day protects objects,
which are not moved aside. An object is referenced if a record, a pin, or a record trashed within the grace references
it. Records are listed before the trash, because records move into the trash; both are listed before anything is moved.
Then each folder of objects is listed and swept.
What a push relies on stays referenced or young until the push's record exists (docs/internals/durability.md).
"""

import contextlib
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from layerstore.disk import hours_on
from layerstore.errors import IntegrityError, InvalidInput, Overtaken, Unsupported
from layerstore.format import stated_store
from layerstore.gc import (
    Facts,
    GcOutcome,
    GcRequest,
    Gone,
    check_confirmed,
    chosen,
    commit_named,
    concluding,
    notes_of,
    readable_pins,
    stranger,
)
from layerstore.history import Needs, references_to
from layerstore.layout import OBJECT_ID
from layerstore.limits import RECORD_BYTES_MAX, REMOTE_GRACE_SECONDS, REMOTE_MOMENT_SECONDS, REMOTE_REQUESTS_MAX
from layerstore.model import Commit, CommitRecord, ObjectId
from layerstore.progress import Progress
from layerstore.remote.bucket import COLLECTIONS_AT_WORK, COLLECTIONS_ENDED, OBJECT_FOLDERS, Bucket
from layerstore.remote.mirror import Remote, is_stranger, to_trash
from layerstore.storage import RecordName, name_in
from layerstore.threads import Threads

_LISTINGS_MAX = 5
_EVER_NS = 1 << 63


def collect(remote: Remote, request: GcRequest, *, dry_run: bool, progress: Progress) -> GcOutcome:
    """
    Remove commits that *request* does not keep, and objects unreferenced for a day; with *dry_run*, only report them.

    A collection can be killed at any moment, and several may run at once.

    Raises:
        IntegrityError: A record, pin or blob cannot be read, so the objects that it needs are unknown.
        Conflict: More would be removed than was confirmed; nothing was removed.
        Unsupported: *request* drops moments, or sets an age limit for trash.
        InvalidInput: The grace is not zero, but shorter than the day that pushes rely on.
    """
    if request.keep.drop_optimizer_older_than is not None:
        raise Unsupported("a remote's commits keep their moments", hint="trim them in a store, and push that")
    if request.trash_seconds is not None:
        raise Unsupported(
            "a remote's trash expires by age alone: a push may rely on it",
            hint="--grace 0s removes everything that is not needed; only while nobody pushes or saves",
        )
    if request.grace_seconds and request.grace_seconds < REMOTE_GRACE_SECONDS:
        raise InvalidInput(
            f"a remote's grace cannot be {request.grace_seconds:g} s: pushes and saves count on 24 hours",
            hint="--grace 0s while nobody pushes or saves; else 24h or more",
        )
    remote.bucket.check_links()
    watch = _Watch()  # before the mark is written: the watch must expire before pushes ignore the mark as old
    with contextlib.nullcontext(time.time_ns()) if dry_run else _at_work(remote.bucket) as now_ns:
        return _collected(remote, request, now_ns, watch, dry_run=dry_run, progress=progress)


@contextlib.contextmanager
def _at_work(bucket: Bucket) -> Iterator[int]:
    """Yield the server's time; leave marks by which pushes recognize that a collection is running, or has run."""
    name = f"{random.getrandbits(64):016x}"
    try:
        yield bucket.mark(f"{COLLECTIONS_AT_WORK}/{name}")
    finally:
        # The second mark is written before the first is removed, so that pushes always find one of them.
        bucket.mark(f"{COLLECTIONS_ENDED}/{name}")
        bucket.remove([f"{COLLECTIONS_AT_WORK}/{name}"])


def _collected(
    remote: Remote, request: GcRequest, now_ns: int, watch: "_Watch", *, dry_run: bool, progress: Progress
) -> GcOutcome:
    bucket, repo = remote.bucket, remote.repo
    grace_seconds = REMOTE_GRACE_SECONDS if request.grace_seconds is None else request.grace_seconds
    # With a grace of zero nobody pushes, so records that move to the trash now need not keep any objects.
    old_before_ns = now_ns - int(grace_seconds * 1e9) if grace_seconds else _EVER_NS
    # After the mark and before the trash is listed, so that a record that moves to the trash is in one of the listings.
    remote.refresh()
    with concluding("nothing was removed"):
        runs = chosen(Facts(repo, request.keep), request, now_ns)
        fates = [fate for _, fates_of_run in runs for fate in fates_of_run]
        notes = notes_of(repo, runs)
        hidden = [view.rows[commit].name for view, _ in runs for commit in view.hidden if commit in view.rows]
        # Hidden commits move before the commits that hide them, or they would reappear if this is killed in between.
        moved = [*hidden, *(fate.name for fate in fates if fate.goes)]
        if remote.stranger_names:
            raise stranger(remote.stranger_names[0], remote=remote.url)
        needs = _named(remote, progress, without=set(moved))
        old_trash, held = _trash(remote, needs, old_before_ns)
        named = (name_in(*name.split("/")[-2:]) for name in old_trash)
        dropped = [name for name in named if name is not None and not repo.records.is_there(name)]
        # Records that move to the trash now keep their objects for a day: a push may have relied on these records.
        for name in moved if grace_seconds else ():
            held.add_readable(repo.catalog.commit(name).record)
    check_confirmed(fates, Gone(), request)  # trash expires by age alone, so it needs no confirmation
    if not dry_run:
        trashed = [_to_trash(remote, name, watch) for name in moved]
        # If this collection has just moved a record over an old copy in the trash, that copy is young again.
        old_trash = [*(name for name in old_trash if name not in trashed), *(() if grace_seconds else trashed)]
        _empty_trash(bucket, old_trash, old_before_ns, watch)
    progress.start("folders of objects", len(OBJECT_FOLDERS))

    def sweep(folder: str) -> tuple[Gone, Gone]:
        counts = _swept(bucket, folder, needs, held, old_before_ns, watch=None if dry_run else watch)
        progress.advance(1)
        return counts

    with Threads(REMOTE_REQUESTS_MAX, thread_name_prefix="sweep") as pool:
        swept = list(pool.map(sweep, OBJECT_FOLDERS))
    objects, young = (sum(parts, Gone()) for parts in zip(*swept, strict=True))
    if not dry_run:
        # Last: marks of collections, and parts of dead jobs. Never this collection's own mark, however short the grace.
        leftovers = (entry for folder in ("gc", "parts") for entry in bucket.listed(folder))
        bucket.remove([entry.name for entry in leftovers if entry.modified_ns < min(old_before_ns, now_ns)])
    references = references_to(repo, fates) if dry_run else [f"{fate.run}@{fate.step}" for fate in fates]
    return GcOutcome(
        commits=tuple(replace(fate, reference=name) for fate, name in zip(fates, references, strict=True)),
        objects=objects,
        orphans=Gone(),  # a remote's collection does not determine which objects the removed commits referenced
        young=young,
        unfinished=Gone(),
        trash=Gone(len(old_trash)),
        pins=tuple(repo.records.pin_names()),
        dropped=tuple(f"{name.run}@{name.step}" for name in dropped),
        notes=notes,
    )


class _Watch:
    """The deadline of a collection: its listings are valid for half a grace."""

    def __init__(self) -> None:
        self._deadline = hours_on() + REMOTE_GRACE_SECONDS / 2

    def check(self) -> None:
        """Raise Overtaken if the deadline has passed; call this before removing anything."""
        if hours_on() > self._deadline:
            raise Overtaken(
                "this collection was suspended for too long, and its listings may be out of date",
                hint="repeat the command",
            )


def _named(remote: Remote, progress: Progress, *, without: Collection[RecordName]) -> Needs:
    """
    Return what the listed records, except *without*, and the listed pins need.

    Raises:
        IntegrityError: A record or pin cannot be read, or has been renamed, so the objects that it needs are unknown.
    """
    repo, layout = remote.repo, remote.repo.layout
    records = {record for name in remote.listed if (record := repo.records.name_at(layout.root / name)) is not None}
    pins = {path.name for name in remote.listed if (path := layout.root / name).parent == layout.pins}
    progress.start("records", len(records))
    needs = Needs(repo)
    for name in sorted(records.difference(without)):
        with commit_named(name):
            commit = _read(remote, name)
            if commit is not None:
                repo.objects.verify_all({blob: () for blob in commit.record.blobs if blob.id not in needs})
                needs.add_record(commit.record)
        progress.advance(1)
    for pin in readable_pins(repo):
        needs.add_record(pin.record)
        pins.discard(pin.name)
    for lost in pins:
        raise IntegrityError(f"pin {lost!r} of {remote.url} is gone from the cache", hint="repeat the command")
    return needs


def _read(remote: Remote, name: RecordName) -> Commit | None:
    """Return the commit *name* from the mirror or else the bucket; None if another collection has moved it."""
    records, layout = remote.repo.records, remote.repo.layout
    path = layout.record(name.run, name.step, name.id)
    try:
        return records.read(name)
    except IntegrityError:
        if remote.repo.files.exists(path):
            raise  # damaged in the bucket, too; a copy that another process pruned is read from the bucket below
    data = remote.bucket.read(layout.name(path), size_bytes_max=RECORD_BYTES_MAX)
    return None if data is None else records.decode(data, name)


def _trash(remote: Remote, needs: Needs, old_before_ns: int) -> tuple[list[str], Needs]:
    """
    Return the names of expired trash, and the objects that the rest of the trash needs in addition to *needs*.

    Raises:
        IntegrityError: Something in the trash does not have a record's name, so the objects that it needs are unknown.
    """
    held, old = Needs(remote.repo, besides=needs), []
    for entry in remote.bucket.listed("trash"):
        if entry.name.startswith("trash/damaged/"):  # damaged records keep no objects
            old += [entry.name] if entry.modified_ns < old_before_ns else []
            continue
        if not entry.name.startswith("trash/commits"):
            continue
        if is_stranger(entry):
            raise stranger(entry.name, remote=remote.url)
        if entry.modified_ns < old_before_ns:
            old.append(entry.name)
            continue
        record = _trashed(remote, entry.name)
        if record is not None:
            held.add_readable(record)
    return old, held


def _trashed(remote: Remote, name: str) -> CommitRecord | None:
    """Return the record *name* from the trash; None if it is gone or damaged, which must not stop a collection."""
    *_, run, file_name = name.split("/")
    record_name, data = name_in(run, file_name), None
    try:
        data = remote.bucket.read(name, size_bytes_max=RECORD_BYTES_MAX)
        if record_name is None or data is None:
            return None
        return remote.repo.records.decode(data, record_name).record
    except IntegrityError:
        if stated_store(data or b"") == remote.repo.identity.store_id:  # the record is intact, but was renamed
            raise stranger(name, remote=remote.url) from None
        return None


def _to_trash(remote: Remote, record: RecordName, watch: "_Watch") -> str:
    """Move *record* to the trash; return its new name in the bucket."""
    path = remote.repo.layout.record(record.run, record.step, record.id)
    name = remote.repo.layout.name(path)
    to_trash(remote.bucket, name, watch.check)
    remote.repo.files.discard(path)
    return f"trash/{name}"


def _empty_trash(bucket: Bucket, names: Collection[str], old_before_ns: int, watch: "_Watch") -> None:
    """Remove *names* from the trash, except names that were moved to the trash again since they were listed."""
    if names:
        watch.check()
        entries, expired = bucket.listed("trash"), set(names)
        bucket.remove([entry.name for entry in entries if entry.name in expired and entry.modified_ns < old_before_ns])


def _swept(
    bucket: Bucket, folder: str, needs: Needs, held: Needs, old_before_ns: int, *, watch: "_Watch | None"
) -> tuple[Gone, Gone]:
    """
    Remove the old, unreferenced objects in *folder*; return how much was removed, and how much is too young.

    A push may rewrite an old object at any time. If a collection is running, the push waits for twice
    REMOTE_MOMENT_SECONDS and checks that the object still exists. So an object is removed only within
    REMOTE_MOMENT_SECONDS of the listing; if this process was suspended in between, it lists the folder again.
    """
    for _ in range(_LISTINGS_MAX):
        listed_at = hours_on()
        unneeded, young = [], Gone()
        for entry in bucket.listed(folder):
            object_id = ObjectId(entry.name.rpartition("/")[2])
            if not OBJECT_ID.fullmatch(object_id) or object_id in needs:
                continue
            if entry.modified_ns >= old_before_ns or object_id in held:
                young += Gone(1, entry.size_bytes)
            else:
                unneeded.append(entry)
        if watch is None:
            break
        watch.check()
        if bucket.remove([entry.name for entry in unneeded], until=listed_at + REMOTE_MOMENT_SECONDS):
            break
    else:
        raise Overtaken(
            f"{bucket.url}: {folder} cannot be listed and cleared within {REMOTE_MOMENT_SECONDS:.0f} s",
            hint="repeat the command where the connection is better",
        )
    return Gone(len(unneeded), sum(entry.size_bytes for entry in unneeded)), young
