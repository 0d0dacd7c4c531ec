"""
Gc: which commits nobody wants to keep go, and then what nothing needs any more.

`plan_gc` reads and decides, and writes nothing; `execute_gc` does it, beside everything else that uses the store.
Records go first, then objects: these are moved aside and looked at again, so that writers and readers need not wait
(docs/internals/durability.md).
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from layerstore.errors import Conflict, IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.format.blobs import STATE_MAGIC, VERSION_MAGIC
from layerstore.gc.mark import Marks, blob_magic, concluding, named, pinned_commits
from layerstore.gc.retention import Fate, choose, views_of
from layerstore.gc.trim import add_needs, plan_trim, trim
from layerstore.gc.unserved import Unserved, unserved
from layerstore.history import Needs, NumberedIds, named_by, references_to
from layerstore.limits import GC_GRACE_SECONDS, GC_UNFINISHED_GRACE_SECONDS, TRASH_SECONDS
from layerstore.model import BlobRef, ObjectId
from layerstore.nearest import did_you_mean, nearest
from layerstore.policy.keep import Keep
from layerstore.progress import Progress, Silent
from layerstore.publish import retire
from layerstore.storage.commits import RecordName
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFate:
    """What becomes of one commit."""

    run: str
    attempt: int
    step: int
    commit: str
    reference: str
    time_ns: int
    """When it was saved."""
    kept_by: tuple[str, ...]
    """The rules that keep it; none where it goes."""
    goes_because: str
    loses_moments: bool
    """Whether it is kept without its optimizer's moments from now on."""
    bytes_freed: int
    """What goes with it, and with none of those listed before."""
    bytes_freed_later: int
    """Likewise, what is too young to go yet."""


@dataclass(frozen=True, slots=True)
class Gone:
    """So many of something, and their bytes."""

    count: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Gone") -> "Gone":
        """Return both together."""
        return Gone(self.count + other.count, self.size_bytes + other.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOutcome:
    """What a collection removed, or would remove."""

    commits: tuple[CommitFate, ...]
    """Every visible commit, run by run, those first that are kept."""
    objects: Gone
    orphans: Gone
    """Those of the objects that no removed commit named: what killed writers left, and what the trash had kept."""
    young: Gone
    """What nothing needs, and is too young to go: somebody may be about to name it."""
    unfinished: Gone
    """Files of writers that never ended, and parts of saves that nobody will complete."""
    trash: Gone
    """Dropped records and damaged files that leave the trash for good."""
    unserved: tuple[Unserved, ...]
    """What kept steps can no longer be asked for."""
    pins: tuple[str, ...]
    """Pins, which keep all that they need."""
    waiting: Gone = field(default_factory=Gone)
    """What stays aside for the next collection, because other nodes may not see yet what is kept."""

    @property
    def removed(self) -> list[CommitFate]:
        """The commits that go."""
        return [fate for fate in self.commits if not fate.kept_by]

    @property
    def trimmed(self) -> list[CommitFate]:
        """The commits that lose their moments."""
        return [fate for fate in self.commits if fate.loses_moments]

    @property
    def bytes_freed(self) -> int:
        """All of it."""
        return self.objects.size_bytes + self.unfinished.size_bytes - self.waiting.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRequest:
    """What is asked of a collection."""

    keep: Keep
    runs: Iterable[str] | None = None
    """Those that *keep* speaks for, None for all; the others keep what they have."""
    grace_seconds: float | None = None
    """How old a thing is at least that goes; None for our own word."""
    trash_seconds: float | None = None
    """How long what was dropped stays in the trash; None for our own word."""
    confirmed: GcOutcome | None = None
    """The plan that somebody was shown; None where nobody was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What is to go, and all that was needed to find out."""

    outcome: GcOutcome
    runs: tuple[tuple[RunView, tuple[Fate, ...]], ...]
    marks: Marks
    old_before_ns: int
    unfinished_before_ns: int
    trash_before_ns: int

    @property
    def fates(self) -> list[Fate]:
        """What becomes of every visible commit."""
        return [fate for _, fates in self.runs for fate in fates]


def has_work(rooms: Rooms, request: GcRequest) -> bool:
    """Whether any record of the runs asked about is to go: only these are looked at, and nothing is marked."""
    now_ns = rooms.aside.now_ns()
    pinned = pinned_commits(rooms)
    views = [rooms.catalog.find(run) for run in request.runs or rooms.catalog.runs()]
    return any(
        fate.goes or fate.loses_moments or fate.is_blind
        for view in views
        if view is not None
        for fate in choose(rooms, view, request.keep, pinned=pinned, now_ns=now_ns)
    )


# -- the plan ------------------------------------------------------------------------------------------------------


def plan_gc(rooms: Rooms, request: GcRequest, *, progress: Progress) -> GcPlan:
    """
    Find out what is to go; nothing is written but a probe for the time.

    Raises:
        IntegrityError: A record, pin, part or blob cannot be read: what it needs is not known, so nothing may go.
            Or records would go, and what is to stay lacks an object.
    """
    with concluding("nothing was removed"):
        return _plan(rooms, request, progress)


def _plan(rooms: Rooms, request: GcRequest, progress: Progress) -> GcPlan:
    now_ns = rooms.aside.now_ns()
    old_before_ns = now_ns - _ns(request.grace_seconds, GC_GRACE_SECONDS)
    unfinished_before_ns = now_ns - _ns(request.grace_seconds, GC_UNFINISHED_GRACE_SECONDS)
    trash_before_ns = now_ns - _ns(request.trash_seconds, TRASH_SECONDS)
    runs = _chosen(rooms, request, now_ns)
    fates = [fate for _, each in runs for fate in each]
    _check_metric(request.keep, fates)
    going = {fate.row.name for fate in fates if fate.goes or fate.loses_moments}
    marks = Marks(
        rooms, old_before_ns=old_before_ns, dead_before_ns=unfinished_before_ns, trash_before_ns=trash_before_ns
    )
    progress.start("records", sum(len(view.rows) for view, _ in runs) - len(going))
    for fate in fates:
        if fate.loses_moments:
            with named(f"{fate.row.run}@{fate.row.step}"):
                planned = plan_trim(rooms, rooms.catalog.commit(fate.row.name))
            marks.check_whole(add_needs(marks.needs, planned), of=fate.row)
    # What only sweeps takes nothing that could stand in for what is lost, so it may go on.
    marks.look(progress, without=going, has_to_be_whole=bool(going))
    tally = _tally(rooms, fates, marks)
    leftovers = rooms.aside.leftovers(before_ns=unfinished_before_ns)
    old_records, old_files = _old_trash(rooms, trash_before_ns)
    outcome = GcOutcome(
        commits=_commit_fates(rooms, fates, tally),
        objects=_sum(tally.old) + _sum(tally.aside),
        orphans=tally.old[None] + tally.aside[None],
        young=_sum(tally.young),
        unfinished=Gone(len(leftovers), sum(size_bytes for _, size_bytes in leftovers)),
        trash=Gone(len(old_records) + len(old_files), sum(map(rooms.trash.size_of_damaged, old_files))),
        unserved=unserved(rooms, runs, needs=marks.needs),
        pins=tuple(rooms.records.pin_names()),
    )
    return GcPlan(
        outcome=outcome,
        runs=runs,
        marks=marks,
        old_before_ns=old_before_ns,
        unfinished_before_ns=unfinished_before_ns,
        trash_before_ns=trash_before_ns,
    )


def _ns(given_seconds: float | None, ours_seconds: float) -> int:
    return int((ours_seconds if given_seconds is None else given_seconds) * 1e9)


def _old_trash(rooms: Rooms, before_ns: int) -> tuple[list[RecordName], list[Path]]:
    records = [name for name in rooms.trash.records() if rooms.trash.modified_ns(name) < before_ns]
    files = [path for path in rooms.trash.damaged() if (rooms.files.modified_ns(path) or before_ns) < before_ns]
    return records, files


@dataclass(frozen=True, slots=True)
class _Tally:
    """What nothing needs any more, by the number of the commit that it goes with; None for what none had named."""

    old: dict[int | None, Gone]
    young: dict[int | None, Gone]
    aside: dict[int | None, Gone]
    """What an earlier collection has moved aside."""


def _tally(rooms: Rooms, fates: Sequence[Fate], marks: Marks) -> _Tally:
    """Look at every object; one goes with the first of the commits that names it."""
    taken = Needs(rooms, besides=marks.needs)
    for number, fate in enumerate(fates):
        if fate.goes or fate.loses_moments:
            # What one names that is damaged counts as orphans as far as it is not known: the commit goes anyway.
            with contextlib.suppress(IntegrityError, NotFound):
                taken.add_record(rooms.catalog.commit(fate.row.name).record, number=number)
    tally = _Tally(*(defaultdict[int | None, Gone](Gone) for _ in range(3)))
    for each in marks.unneeded():
        (tally.young if each.is_young else tally.old)[taken.number(each.ref.id)] += Gone(1, each.ref.size_bytes)
    for each in marks.aside():
        if not each.is_young:
            tally.aside[taken.number(each.ref.id)] += Gone(1, each.ref.size_bytes)
    return tally


def _sum(parts: Mapping[int | None, Gone]) -> Gone:
    return sum(parts.values(), Gone())


def _chosen(rooms: Rooms, request: GcRequest, now_ns: int) -> tuple[tuple[RunView, tuple[Fate, ...]], ...]:
    views = views_of(rooms)
    wanted = {view.run for view in views} if request.runs is None else set(request.runs)
    missing = wanted - {view.run for view in views}
    if missing:
        run = min(missing)
        hint = did_you_mean(nearest(run, (view.run for view in views)), else_="layerstore log lists the runs")
        raise NotFound(f"there is no run {run!r} in this store", hint=hint)
    pinned = pinned_commits(rooms)
    return tuple(
        (view, choose(rooms, view, request.keep if view.run in wanted else None, pinned=pinned, now_ns=now_ns))
        for view in views
    )


def _check_metric(keep: Keep, fates: Sequence[Fate]) -> None:
    best = keep.best_of
    reasons = {reason for fate in fates for reason in fate.kept_by}
    if best is None or best.reason in reasons or not fates:
        return
    raise InvalidInput(
        f"no commit has {best.metric!r} in its trainer_state.json; nothing was changed",
        hint="the metric has to be logged at the step of a save, under this very name",
    )


def _commit_fates(rooms: Rooms, fates: Sequence[Fate], tally: _Tally) -> tuple[CommitFate, ...]:
    """Return what becomes of every commit, with the bytes that go with it."""
    references = references_to(rooms, [fate.row for fate in fates])
    return tuple(
        CommitFate(
            run=fate.row.run,
            attempt=fate.row.attempt,
            step=fate.row.step,
            commit=fate.row.id,
            reference=reference,
            time_ns=fate.time_ns,
            kept_by=fate.kept_by,
            goes_because=fate.goes_because,
            loses_moments=fate.loses_moments,
            bytes_freed=tally.old[number].size_bytes + tally.aside[number].size_bytes,
            bytes_freed_later=tally.young[number].size_bytes,
        )
        for number, (fate, reference) in enumerate(zip(fates, references, strict=True))
    )


# -- the deed ------------------------------------------------------------------------------------------------------


def execute_gc(rooms: Rooms, request: GcRequest, *, progress: Progress) -> GcOutcome:
    """
    Remove what `plan_gc` finds, and raise as that does.

    It may be stopped at any moment: what is needed stays findable, and the next collection settles what is left aside.

    Raises:
        Locked: Another collection is under way, or began while this one was suspended.
        Conflict: More would go than in the plan that was confirmed; nothing was removed. Or a migration is under way,
            or was interrupted.
    """
    rooms.prepare_writing()
    with rooms.lock_gc() as hold:
        _check_no_migration(rooms)
        plan = plan_gc(rooms, request, progress=progress)
        _check_confirmed(plan, request)
        hold.check()
        _remove_records(rooms, plan)
        _check_no_migration(rooms)
        _look_again(plan)
        rooms.aside.make_folder()
        progress.start("remove", plan.outcome.objects.size_bytes)
        freed = Gone()
        while True:
            full = _sweep(rooms, plan, progress)
            listed = _list_aside(rooms)
            _look_again(plan)
            hold.check()  # whoever has the lock now settles what lies aside
            gone, waiting = _settle(rooms, plan, listed)
            freed += gone
            if full is None:
                break
            if not gone.count:
                raise full
        _tidy(rooms, plan)
        return replace(plan.outcome, objects=freed + waiting, waiting=waiting)


def _check_confirmed(plan: GcPlan, request: GcRequest) -> None:
    """Raise Conflict if more is to go than whoever was asked has seen."""
    if request.confirmed is None:
        return
    removed = {fate.commit for fate in request.confirmed.removed}
    trimmed = {fate.commit for fate in request.confirmed.trimmed} | removed
    for fate in plan.fates:
        if (fate.goes and fate.row.id not in removed) or (fate.loses_moments and fate.row.id not in trimmed):
            raise Conflict(
                f"{fate.row.run}@{fate.row.step} was to stay when the plan was shown, and is to go by now; "
                "nothing was removed",
                hint="look at the new plan: repeat the command",
            )


def _check_no_migration(rooms: Rooms) -> None:
    """
    Make sure that no migration has read the records that this collection removes: it would bring them back.

    A migration makes its folder and then reads; a collection removes records and then looks for that folder, before
    any object goes. So one of them sees the other, whoever has lost which lock.
    """
    rooms.records.check_store()
    if rooms.files.exists(rooms.layout.migrating):
        raise Conflict(
            "a migration of this store was begun and is not finished; no object was removed",
            hint="layerstore migrate finishes it, or begins it afresh",
        )


def _remove_records(rooms: Rooms, plan: GcPlan) -> None:
    """Remove the records that go, and empty the trash; first what they still hide, which would show again."""
    for view, fates in plan.runs:
        if view.hidden:
            for row in view.visible:
                retire(rooms, rooms.catalog.commit(row.name))
        for fate in fates:
            if fate.loses_moments:
                trim(rooms, fate.row)
        going = [fate.row.name for fate in fates if fate.goes]
        rooms.records.remove(going)
        rooms.catalog.forget(going)
    records, files = _old_trash(rooms, plan.trash_before_ns)
    for name in records:
        rooms.trash.remove_record(name)
    for path in files:
        rooms.trash.remove_damaged(path)


def _look_again(plan: GcPlan) -> None:
    with concluding("objects that were to go lie aside until a gc succeeds"):  # by now records are gone
        plan.marks.look(Silent())


def _sweep(rooms: Rooms, plan: GcPlan, progress: Progress) -> StorageIO | None:
    """Move aside what is old and nothing needs; on a full disk return the error: what is aside by then makes room."""
    try:
        for each in plan.marks.doomed():
            rooms.aside.take(each.ref.id)
            progress.advance(each.ref.size_bytes)
    except StorageIO as exc:
        if exc.kind != "no_space":
            raise
        return exc
    return None


def _list_aside(rooms: Rooms) -> NumberedIds:
    """
    Return all that lies aside.

    What comes there after the second look was moved by another collection, which has lost its lock or found this one's
    lost: only that one knows whether it may go.
    """
    found = NumberedIds()
    for object_id, _ in rooms.aside.objects():
        found.add(object_id, 0)
    return found


def _settle(rooms: Rooms, plan: GcPlan, listed: NumberedIds) -> tuple[Gone, Gone]:
    """
    Put back what is needed of what lies aside, and unlink the rest of what is *listed*; return that, and what waits.

    What a killed collection has left is settled by the same rule. On a network filesystem another node's listing may
    be late: there only what an earlier collection has moved is removed, and the rest waits for the next one.
    """
    marks = plan.marks
    for each in marks.aside():
        if each.is_young:
            marks.spare(each.ref)
    blobs: list[BlobRef] = []
    others = NumberedIds()
    back: list[BlobRef] = []
    for object_id, path in rooms.aside.objects():
        ref = BlobRef(id=object_id, size_bytes=rooms.files.size(path) or 0)
        if marks.is_needed(object_id, path):
            back.append(ref)
        elif object_id in listed and _is_blob(rooms, ref):
            blobs.append(ref)
        elif object_id in listed:
            others.add(object_id, 0)
    _put_back(rooms, back)
    sums = {True: Gone(), False: Gone()}
    for ref in blobs:
        path = rooms.layout.aside / ref.id
        if marks.is_needed(ref.id, path):
            _put_back(rooms, [ref])
        else:
            sums[_remove(rooms, plan, ref.id, path)] += Gone(1, ref.size_bytes)
        if rooms.files.exists(rooms.layout.object(ref.id)):
            # A writer has put it back: at its place it says that all that it names is there.
            marks.spare(ref)
            _put_back(rooms, _named_by(rooms, ref) or ())
    for object_id, path in rooms.aside.objects():
        size_bytes = rooms.files.size(path) or 0
        if object_id in others and not marks.is_needed(object_id, path):
            sums[_remove(rooms, plan, object_id, path)] += Gone(1, size_bytes)
    rooms.aside.sync()
    return sums[True], sums[False]


def _remove(rooms: Rooms, plan: GcPlan, object_id: ObjectId, path: Path) -> bool:
    """Unlink what lies aside, unless it has to wait for the next collection; return whether it is gone."""
    if rooms.aside.is_on_network and rooms.aside.moved_ns(path) >= plan.old_before_ns:
        return False
    rooms.aside.remove([object_id])
    return True


def _is_blob(rooms: Rooms, ref: BlobRef) -> bool:
    try:
        return blob_magic(rooms, ref) in {VERSION_MAGIC, STATE_MAGIC}
    except IntegrityError:
        return False  # gone meanwhile


def _put_back(rooms: Rooms, objects: Iterable[BlobRef]) -> None:
    """
    Give *objects* their names again, blobs last, each after all that it names: at its place it says that this is there.

    All of it is touched, so that no collection beside this one takes it.
    """
    blobs = []
    for ref in objects:
        named = _named_by(rooms, ref)
        if named is None:
            _put_back_one(rooms, ref)
        else:
            blobs.append((ref, named))
    for ref, named in blobs:
        if all(_put_back_one(rooms, each) for each in named):
            _put_back_one(rooms, ref)


def _put_back_one(rooms: Rooms, ref: BlobRef) -> bool:
    aside = rooms.layout.aside / ref.id
    is_aside = rooms.files.exists(aside)
    is_home = ObjectWriter(rooms.layout, rooms.files, rooms.objects).put_back(ref)
    if is_home and is_aside:
        rooms.files.unlink(aside)
    return is_home


def _named_by(rooms: Rooms, ref: BlobRef) -> list[BlobRef] | None:
    """Return what the blob *ref* names; None where it is none, or damaged."""
    try:
        return named_by(rooms, ref) if _is_blob(rooms, ref) else None
    except IntegrityError:
        return None


def _tidy(rooms: Rooms, plan: GcPlan) -> None:
    for session in plan.marks.dead_sessions:
        rooms.parts.remove_session(session, before_ns=plan.unfinished_before_ns)
    for path, _ in rooms.aside.leftovers(before_ns=plan.unfinished_before_ns):
        rooms.files.unlink(path)
