"""
Gc: the commits that nobody wants to keep go, and then what nothing needs any more.

A plan first, which writes nothing. It is marked from what is kept: from records, pins and the parts of saves under
way, never from the index. What goes is moved aside and looked at again, so that writers and readers need not wait
(docs/reference/format.md, section 6.11).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from layerstore.errors import IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.limits import GC_GRACE_SECONDS, GC_UNFINISHED_GRACE_SECONDS
from layerstore.model import BlobRef, CollectedRecord, Collection, ObjectId
from layerstore.ops.marking import Marks, pinned_commits
from layerstore.ops.needs import Needs
from layerstore.ops.past import view_or_none
from layerstore.ops.progress import Progress, Silent
from layerstore.ops.refs import references_to
from layerstore.ops.retention import Fate, RunPlan, plan_run, views_of, waves
from layerstore.ops.rooms import Rooms
from layerstore.ops.trimming import add_needs, execute_trim
from layerstore.ops.unserved import Unserved, unserved
from layerstore.policy.keep import Keep
from layerstore.storage.commits import RecordName
from layerstore.storage.garbage import names_in
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
    """When it was saved; 0 of a hidden one."""
    kept_by: tuple[str, ...]
    """The rules that keep it; none where it goes."""
    goes_because: str
    is_visible: bool
    loses_moments: bool
    """Whether it is kept without its optimizer's moments from now on."""
    bytes_freed: int
    """What goes with it, and with none of those listed before."""


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
    """Every commit, run by run, those first that are kept."""
    objects: Gone
    orphans: Gone
    """Those of the objects that no removed commit named: what killed writers left."""
    young: Gone
    """What nothing needs, and is too young to go: somebody may be about to name it."""
    unfinished: Gone
    """Files of writers that never ended, and parts of saves that nobody will complete."""
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
class GcPlan:
    """What is to go, and all that was needed to find out."""

    outcome: GcOutcome
    runs: tuple[tuple[RunView, RunPlan], ...]
    marks: Marks
    doomed: dict[ObjectId, int]
    """Objects to go, with their sizes."""
    unfinished: list[Collection]
    """Collections that were stopped before all their records were gone."""
    old_before_ns: int
    unfinished_before_ns: int

    @property
    def going(self) -> list[Fate]:
        """The records to be removed."""
        return [fate for _, run in self.runs for fate in run.fates if fate.goes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a collection."""

    keep: Keep
    runs: Iterable[str] | None = None
    """Those that *keep* speaks for, None for all; the others keep what they have."""
    grace_seconds: float | None = None
    """How old a thing is at least that goes; None for our own word."""


def has_work(rooms: Rooms, request: Request) -> bool:
    """Whether any record of the runs asked about is to go: only these are looked at, and nothing is marked."""
    now_ns = rooms.garbage.now_ns()
    pinned = pinned_commits(rooms)
    views = [view_or_none(rooms, run) for run in request.runs or rooms.catalog.runs()]
    return any(
        fate.goes
        for view in views
        if view is not None
        for fate in plan_run(rooms, view, request.keep, pinned=pinned, now_ns=now_ns).fates
    )


def plan_gc(rooms: Rooms, request: Request, *, progress: Progress) -> GcPlan:
    """
    Find out what is to go; nothing is written but a probe for the time.

    Raises:
        IntegrityError: A record, pin, part or blob cannot be read: what it needs is not known, so nothing may go.
    """
    now_ns = rooms.garbage.now_ns()
    given = request.grace_seconds
    old_before_ns = now_ns - int((GC_GRACE_SECONDS if given is None else given) * 1e9)
    unfinished_before_ns = now_ns - int((GC_UNFINISHED_GRACE_SECONDS if given is None else given) * 1e9)
    planned = _planned_runs(rooms, request, now_ns)
    _check_metric(request.keep, planned)
    going = {fate.row.name for _, plan in planned for fate in plan.fates if fate.goes}
    marks = Marks(rooms, without=going, dead_before_ns=unfinished_before_ns)
    progress.start("mark", sum(len(view.rows) for view, _ in planned) - len(going))
    for _, plan in planned:
        for fate in plan.fates:
            if fate.trim is not None:
                add_needs(marks.needs, fate.trim)
    marks.look(progress)
    unneeded = marks.unneeded(old_before_ns=old_before_ns)
    aside = _left_aside(rooms, marks, old_before_ns)
    commits, orphans = _fates(rooms, planned, unneeded.old | aside)
    tmp_count, tmp_bytes = rooms.garbage.sweep_tmp(before_ns=unfinished_before_ns, dry_run=True)
    outcome = GcOutcome(
        commits=commits,
        objects=_amount(unneeded.old | aside),
        orphans=orphans,
        young=_amount(unneeded.young),
        unfinished=Gone(count=tmp_count, size_bytes=tmp_bytes),
        unserved=unserved(rooms, planned),
        pins=tuple(rooms.records.pin_names()),
    )
    return GcPlan(
        outcome=outcome,
        runs=planned,
        marks=marks,
        doomed=unneeded.old,
        unfinished=rooms.garbage.unfinished(partial(_is_there, rooms)),
        old_before_ns=old_before_ns,
        unfinished_before_ns=unfinished_before_ns,
    )


def _left_aside(rooms: Rooms, marks: Marks, old_before_ns: int) -> dict[ObjectId, int]:
    """Return what earlier collections have moved aside and nothing needs, with the sizes."""
    found = {}
    for collection_id in rooms.garbage.asides():
        for object_id, path in rooms.garbage.objects_aside(collection_id):
            modified_ns, size_bytes = rooms.files.modified_ns(path), rooms.files.size(path)
            if object_id not in marks.needs and size_bytes is not None and (modified_ns or 0) < old_before_ns:
                found[object_id] = size_bytes
    return found


def _amount(objects: dict[ObjectId, int]) -> Gone:
    return Gone(count=len(objects), size_bytes=sum(objects.values()))


def _planned_runs(rooms: Rooms, request: Request, now_ns: int) -> tuple[tuple[RunView, RunPlan], ...]:
    views = views_of(rooms)
    wanted = {view.run for view in views} if request.runs is None else set(request.runs)
    missing = wanted - {view.run for view in views}
    if missing:
        raise NotFound(f"there is no run {min(missing)!r} in this store", hint="layerstore log lists the runs")
    pinned = pinned_commits(rooms)
    return tuple(
        (view, plan_run(rooms, view, request.keep if view.run in wanted else None, pinned=pinned, now_ns=now_ns))
        for view in views
    )


def _check_metric(keep: Keep, planned: Iterable[tuple[RunView, RunPlan]]) -> None:
    best = keep.best_of
    reasons = {reason for _, plan in planned for fate in plan.fates for reason in fate.kept_by}
    if best is None or best.reason in reasons or not any(plan.fates for _, plan in planned):
        return
    raise InvalidInput(
        f"no commit has {best.metric!r} in its trainer_state.json; nothing was changed",
        hint="the metric has to be logged at the step of a save, under this very name",
    )


def _fates(
    rooms: Rooms, planned: Iterable[tuple[RunView, RunPlan]], doomed: dict[ObjectId, int]
) -> tuple[tuple[CommitFate, ...], Gone]:
    """Return what becomes of every commit, with the bytes that go with it, and what no commit had named."""
    left = dict(doomed)
    taken = Needs(rooms)
    commits = []
    for _, plan in planned:
        shown = [fate for fate in plan.fates if fate.row.layer_names]
        for fate, reference in zip(shown, references_to(rooms, [fate.row for fate in shown]), strict=True):
            freed = 0
            if fate.goes:
                freed = sum(left.pop(ObjectId(ref.id), 0) for ref in _needed_by(rooms, taken, fate))
            commits.append(_commit_fate(fate, reference, freed))
    return tuple(commits), _amount(left)


def _needed_by(rooms: Rooms, taken: Needs, fate: Fate) -> list[BlobRef]:
    try:
        return taken.add_record(rooms.catalog.commit(fate.row.name).record)
    except IntegrityError:
        return []  # it goes anyway; what it named counts as orphans


def _commit_fate(fate: Fate, reference: str, freed: int) -> CommitFate:
    row = fate.row
    return CommitFate(
        run=row.run,
        attempt=row.attempt,
        step=row.step,
        commit=row.id,
        reference=reference,
        time_ns=fate.time_ns,
        kept_by=fate.kept_by,
        goes_because=fate.goes_because,
        is_visible=fate.is_visible,
        loses_moments=fate.trim is not None,
        bytes_freed=freed,
    )


# -- removing ------------------------------------------------------------------------------------------------------


def execute_gc(rooms: Rooms, request: Request, *, progress: Progress) -> GcOutcome:
    """
    Remove what `plan_gc` finds, and raise as that does.

    It may be stopped at any moment: what is needed stays findable, and the next collection takes up what is left.

    Raises:
        Locked: Another collection is under way.
    """
    rooms.prepare_writing()
    with rooms.lock_gc():
        try:
            return _collect(rooms, request, progress)
        except StorageIO as exc:
            if exc.kind != "no_space" or not rooms.garbage.release_reserve():
                raise
            return _collect(rooms, request, progress)


def _collect(rooms: Rooms, request: Request, progress: Progress) -> GcOutcome:
    plan = plan_gc(rooms, request, progress=progress)
    collection = _collection(rooms, plan)
    if plan.doomed or collection.records:
        rooms.garbage.publish(collection)
    for earlier in plan.unfinished:
        rooms.garbage.forget(earlier.id)
    if plan.doomed or collection.records:
        _remove_records(rooms, plan)
        _set_aside(rooms, plan, collection.id, progress)
    freed, waiting = _settle(rooms, plan)
    for session in plan.marks.dead_sessions:
        rooms.parts.remove_session(session, before_ns=plan.unfinished_before_ns)
    rooms.garbage.sweep_tmp(before_ns=plan.unfinished_before_ns, dry_run=False)
    rooms.garbage.forget_old_plans()
    rooms.garbage.make_reserve(records=sum(not fate.goes for _, run in plan.runs for fate in run.fates))
    return replace(plan.outcome, objects=freed + waiting, waiting=waiting)


def _collection(rooms: Rooms, plan: GcPlan) -> Collection:
    """Return what *plan* decides; with it what an earlier collection has removed, whose plan was not carried out."""
    going = {fate.row.name: fate.goes_because or "its moments go" for fate in plan.going}
    gone = {
        name: "removed by a collection that was stopped"
        for earlier in plan.unfinished
        for name in names_in(earlier)
        if name not in going and not _is_there(rooms, name)
    }
    return Collection(
        id=rooms.garbage.next_id(after=rooms.catalog.last_collection()),
        records=tuple(
            CollectedRecord(run=name.run, step=name.step, id=name.id, reason=reason)
            for name, reason in {**gone, **going}.items()
        ),
        objects=plan.outcome.objects.count,
        size_bytes=plan.outcome.objects.size_bytes,
    )


def _is_there(rooms: Rooms, name: RecordName) -> bool:
    return rooms.files.exists(rooms.layout.record(name.run, name.step, name.id))


def _remove_records(rooms: Rooms, plan: GcPlan) -> None:
    for view, run in plan.runs:
        for stand_in in run.stand_ins:
            rooms.records.publish(stand_in)
            rooms.catalog.add(stand_in)
        for fate in run.fates:
            if fate.trim is not None:
                execute_trim(rooms, fate.trim)
        for group in waves(view, {fate.row.id for fate in run.fates if fate.goes}):
            rooms.records.remove([row.name for row in group])
        view_or_none(rooms, view.run)  # which tells the index


def _set_aside(rooms: Rooms, plan: GcPlan, collection_id: str, progress: Progress) -> None:
    progress.start("remove", sum(plan.doomed.values()))
    rooms.garbage.open_aside(collection_id)
    for object_id, size_bytes in plan.doomed.items():
        rooms.garbage.set_aside(object_id, collection_id=collection_id)
        progress.advance(size_bytes)


def _settle(rooms: Rooms, plan: GcPlan) -> tuple[Gone, Gone]:
    """
    Look once more at who needs what lies aside, put that back, and remove the rest; return that, and what has to wait.

    Also what earlier collections have left, and only now: a blob that is at its place says that its objects are too.
    """
    asides = rooms.garbage.asides()
    # Another node's listing may be late: there it takes a later collection to look again.
    late = [each for each in asides if rooms.garbage.opened_ns(each) >= plan.old_before_ns]
    waiting = late if rooms.garbage.is_network() else []
    ready = [each for each in asides if each not in waiting]
    plan.marks.look(Silent())
    needs = plan.marks.needs

    def is_young(path: Path) -> bool:
        modified_ns = rooms.files.modified_ns(path)
        return modified_ns is not None and modified_ns >= plan.old_before_ns

    for collection_id in ready:
        for object_id, path in rooms.garbage.objects_aside(collection_id):
            size_bytes = rooms.files.size(path)
            if object_id not in needs and size_bytes is not None and is_young(path):
                plan.marks.keep_with(BlobRef(id=object_id, size_bytes=size_bytes))
    freed = Gone()
    for collection_id in ready:
        freed += Gone(*rooms.garbage.settle(collection_id, is_needed=lambda of, path: of in needs or is_young(path)))
    left = {of: rooms.files.size(path) or 0 for each in waiting for of, path in rooms.garbage.objects_aside(each)}
    return freed, _amount(left)
