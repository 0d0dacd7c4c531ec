"""
Collecting: what a plan says is removed, beside everything else that uses the store.

Moments go first, then records, then objects: these are moved aside and looked at again, so that writers and readers
need not wait (docs/reference/format.md, section 6.11).
"""

from collections.abc import Set
from dataclasses import replace

from layerstore.errors import Conflict, Locked, StorageIO
from layerstore.model import CollectedRecord, Collection
from layerstore.ops.gc import GcOutcome, GcPlan, Gone, Request, plan_gc
from layerstore.ops.given_up import is_hidden
from layerstore.ops.marking import concluding
from layerstore.ops.progress import Progress, Silent
from layerstore.ops.retention import waves
from layerstore.ops.rooms import Rooms
from layerstore.ops.trims import Trimming, shows_what_stays, trim_all
from layerstore.storage.commits import RecordName
from layerstore.storage.garbage import names_in
from layerstore.storage.holders import Hold


def execute_gc(rooms: Rooms, request: Request, *, progress: Progress) -> GcOutcome:
    """
    Remove what `plan_gc` finds, and raise as that does.

    It may be stopped at any moment: what is needed stays findable, and the next collection takes up what is left.

    Raises:
        Locked: Another collection is under way, or began while this one was suspended; then nothing was removed.
        Conflict: A migration is under way, or was interrupted; if it began just now some records may be gone, and
            every object is where it is found.
    """
    rooms.prepare_writing()
    try:
        return _collect_alone(rooms, request, progress)
    except StorageIO as exc:
        # A full disk may have no room for the very lock.
        if exc.kind != "no_space" or not rooms.garbage.release_reserve():
            raise
        return _collect_alone(rooms, request, progress)


def _collect_alone(rooms: Rooms, request: Request, progress: Progress) -> GcOutcome:
    with rooms.lock_gc() as hold:
        return _collect(rooms, request, progress, hold)


def _collect(rooms: Rooms, request: Request, progress: Progress, hold: Hold) -> GcOutcome:
    _check_no_migration(rooms)
    while True:
        plan = plan_gc(rooms, request, progress=progress)
        _check_confirmed(plan, request)
        hold.check()  # the other one's plan is not to be taken for an abandoned one
        # First, for it removes nothing: the plan then names what others stand in for, and stays believable.
        trimming = trim_all(rooms, plan.runs, hold=hold)
        collection = _collection(rooms, plan, trimming)
        has_work = plan.doomed.count > 0 or len(collection.records) > 0
        if has_work:
            rooms.garbage.publish(collection)
            _make_sure_of_it(rooms, collection, hold)
        if not has_work or _is_kept_still(rooms, plan, trimming):
            break
        rooms.garbage.forget(collection.id)
    for earlier in plan.unfinished:
        rooms.garbage.forget(earlier.id)
    if has_work:
        _give_up(rooms, {fate.row.name for fate in plan.going if not trimming.was_left(fate)})
        _remove_records(rooms, plan, trimming, collection)
        _set_aside(rooms, plan, collection.id, progress)
    _check_no_migration(rooms)
    freed, waiting = _settle(rooms, plan)
    for session in plan.marks.dead_sessions:
        rooms.parts.remove_session(session, before_ns=plan.unfinished_before_ns)
    rooms.garbage.sweep_tmp(before_ns=plan.unfinished_before_ns, dry_run=False)
    rooms.garbage.forget_old_plans()
    kept = [fate.row for _, run in plan.runs for fate in run.fates if not fate.goes]
    rooms.garbage.make_reserve(records=len(kept), layers=max((len(row.layer_names) for row in kept), default=0))
    if trimming.problem is not None:
        raise trimming.problem
    return replace(plan.outcome, objects=freed + waiting, waiting=waiting)


def _check_confirmed(plan: GcPlan, request: Request) -> None:
    """Raise Conflict if more is to go than whoever was asked has seen."""
    if request.confirmed is None:
        return
    more = [fate.row for fate in plan.going if fate.is_visible and not request.confirmed.allows(fate)]
    if more:
        raise Conflict(
            f"{more[0].run}@{more[0].step} was to stay when the plan was shown, and is to go by now; "
            "nothing was removed",
            hint="look at the new plan: repeat the command",
        )


def _is_kept_still(rooms: Rooms, plan: GcPlan, trimming: Trimming) -> bool:
    """
    Whether all commits show that *plan* has kept: the others go because these stay.

    Somebody may have dropped or replaced one since. A collection writes its plan and then looks here; a drop hides its
    commit and then looks for such plans. So one of them sees the other, without a lock.
    """
    return all(
        shows_what_stays(rooms, view, run, trimming) for view, run in plan.runs if any(fate.goes for fate in run.fates)
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


def _make_sure_of_it(rooms: Rooms, collection: Collection, hold: Hold) -> None:
    """Look at the lock once more, right before the point of no return; what will not be done is not left as a plan."""
    try:
        hold.check()
    except Locked:
        rooms.garbage.forget(collection.id)
        raise


def _collection(rooms: Rooms, plan: GcPlan, trimming: Trimming) -> Collection:
    """Return what *plan* decides; with it what an earlier collection has removed, whose plan was not carried out."""
    going = {fate.row.name: fate.goes_because or "its moments go" for fate in plan.going if not trimming.was_left(fate)}
    gone = {
        name: "removed by a collection that was stopped"
        for earlier in plan.unfinished
        for name in names_in(earlier)
        if name not in going and not rooms.records.is_there(name)
    }
    return Collection(
        id=rooms.garbage.next_id(),
        records=tuple(
            CollectedRecord(run=name.run, step=name.step, id=name.id, reason=reason)
            for name, reason in {**gone, **going}.items()
        ),
        objects=plan.outcome.objects.count,
        size_bytes=plan.outcome.objects.size_bytes,
    )


def _give_up(rooms: Rooms, going: Set[RecordName]) -> None:
    """
    Give up what lies in quarantine of records that go, or that others hide.

    Once these are gone, or those that hide them, it would say that one is lost.
    """
    for lost in rooms.quarantine.records():
        if lost.name in going or is_hidden(rooms, lost.name):
            rooms.quarantine.give_up(lost.path)


def _remove_records(rooms: Rooms, plan: GcPlan, trimming: Trimming, collection: Collection) -> None:
    for view, run in plan.runs:
        for stand_in in run.stand_ins:
            rooms.records.publish(stand_in)
            rooms.catalog.add(stand_in)
        going = {fate.row.id for fate in run.fates if fate.goes and not trimming.was_left(fate)}
        for group in waves(view, going):
            if not rooms.files.exists(rooms.layout.plan(collection.id)):
                return  # another collection has taken it over: the records are that one's by now
            names = [row.name for row in group]
            rooms.records.remove(names)
            rooms.catalog.forget(names)


def _set_aside(rooms: Rooms, plan: GcPlan, collection_id: str, progress: Progress) -> None:
    progress.start("remove", plan.doomed.size_bytes)
    rooms.garbage.open_aside(collection_id)
    for each in plan.marks.doomed():
        rooms.garbage.set_aside(each.ref.id, collection_id=collection_id)
        progress.advance(each.ref.size_bytes)


def _settle(rooms: Rooms, plan: GcPlan) -> tuple[Gone, Gone]:
    """
    Look once more at who needs what lies aside, put that back, and remove the rest; return that, and what has to wait.

    Also what earlier collections have left, and only now: a blob that is at its place says that its objects are too.
    """
    marks = plan.marks
    asides = rooms.garbage.asides()
    # Another node's listing may be late: there it takes a later collection to look again.
    late = [each for each in asides if rooms.garbage.opened_ns(each) >= plan.old_before_ns]
    waiting = late if rooms.garbage.is_network() else []
    ready = [each for each in asides if each not in waiting]
    with concluding("objects that were to go lie aside until a gc succeeds"):  # by now records are gone
        marks.look(Silent())
    for collection_id in ready:
        for each in marks.aside(collection_id):
            if each.is_young:
                marks.spare(each.ref)
    freed = left = Gone()
    for collection_id in ready:
        freed += Gone(*rooms.garbage.settle(collection_id, is_needed=marks.is_needed))
    for collection_id in waiting:
        for _, path in rooms.garbage.objects_aside(collection_id):
            left += Gone(1, rooms.files.size(path) or 0)
    return freed, left
