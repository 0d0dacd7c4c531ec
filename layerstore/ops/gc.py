"""
Gc: the commits that nobody wants to keep go, and then what nothing needs any more.

A plan first, which writes nothing. It is marked from what is kept: from records, pins and the parts of saves under
way, never from the index. What goes is moved aside and looked at again, so that writers and readers need not wait
(docs/reference/format.md, section 6.11).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from layerstore.errors import IntegrityError, NotFound
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """So many of something, and their bytes."""

    count: int = 0
    size_bytes: int = 0


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
    going = {fate.row.name for _, plan in planned for fate in plan.fates if fate.goes}
    marks = Marks(rooms, without=going, dead_before_ns=unfinished_before_ns)
    progress.start("mark", sum(len(view.rows) for view, _ in planned) - len(going))
    for _, plan in planned:
        for fate in plan.fates:
            if fate.trim is not None:
                add_needs(marks.needs, fate.trim)
    marks.look(progress)
    unneeded = marks.unneeded(old_before_ns=old_before_ns)
    commits, orphans = _fates(rooms, planned, unneeded.old)
    tmp_count, tmp_bytes = rooms.garbage.sweep_tmp(before_ns=unfinished_before_ns, dry_run=True)
    outcome = GcOutcome(
        commits=commits,
        objects=_amount(unneeded.old),
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
        old_before_ns=old_before_ns,
        unfinished_before_ns=unfinished_before_ns,
    )


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
        plan = plan_gc(rooms, request, progress=progress)
        for earlier in rooms.garbage.asides():
            _settle(rooms, plan, earlier)
        collection = _collection(rooms, plan)
        waiting = Gone()
        if plan.doomed or collection.records:
            rooms.garbage.publish(collection)
            _remove_records(rooms, plan)
            waiting = _remove_objects(rooms, plan, collection.id, progress)
        for session in plan.marks.dead_sessions:
            rooms.parts.remove_session(session)
        rooms.garbage.sweep_tmp(before_ns=plan.unfinished_before_ns, dry_run=False)
        rooms.garbage.forget_old_plans()
        rooms.garbage.make_reserve()
    return replace(plan.outcome, waiting=waiting)


def _collection(rooms: Rooms, plan: GcPlan) -> Collection:
    return Collection(
        id=rooms.garbage.next_id(),
        records=tuple(
            CollectedRecord(
                run=fate.row.run, step=fate.row.step, id=fate.row.id, reason=fate.goes_because or "its moments go"
            )
            for fate in plan.going
        ),
        objects=plan.outcome.objects.count,
        size_bytes=plan.outcome.objects.size_bytes,
    )


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


def _remove_objects(rooms: Rooms, plan: GcPlan, collection_id: str, progress: Progress) -> Gone:
    progress.start("remove", plan.outcome.objects.size_bytes)
    rooms.garbage.open_aside(collection_id)
    for object_id, size_bytes in plan.doomed.items():
        rooms.garbage.set_aside(object_id, collection_id=collection_id)
        progress.advance(size_bytes)
    if rooms.garbage.is_network():
        return plan.outcome.objects  # another node's listing may be late: a later collection looks again
    _settle(rooms, plan, collection_id)
    return Gone()


def _settle(rooms: Rooms, plan: GcPlan, collection_id: str) -> None:
    """Look once more at who needs what lies aside, put that back, and remove the rest."""
    plan.marks.look(Silent())
    needs = plan.marks.needs

    def is_young(path: Path) -> bool:
        modified_ns = rooms.files.modified_ns(path)
        return modified_ns is not None and modified_ns >= plan.old_before_ns

    for object_id, path in rooms.garbage.objects_aside(collection_id):
        size_bytes = rooms.files.size(path)
        if object_id not in needs and size_bytes is not None and is_young(path):
            plan.marks.keep_with(BlobRef(id=object_id, size_bytes=size_bytes))
    rooms.garbage.settle(collection_id, is_needed=lambda object_id, path: object_id in needs or is_young(path))
