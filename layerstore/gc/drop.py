"""
Drop: one commit is hidden.

Nothing is removed: a record without layers supersedes the commit, and its link is the one moment of the change.
Commits that inherited layers keep exactly their versions, and ingesting the checkpoint again shows it again.
"""

from dataclasses import dataclass

from layerstore.errors import Conflict, IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.layers import parse_reference, typed
from layerstore.model import Commit, CommitId
from layerstore.publish.claims import take_back
from layerstore.check.given_up import records_meant
from layerstore.publish.hiding import hiding_commit
from layerstore.history.references import Resolved, reference_to, references_to, resolve
from layerstore.gc.retention import STAND_IN
from layerstore.storage.rooms import Rooms
from layerstore.storage.garbage import names_in
from layerstore.storage.manifest import RecordRow
from layerstore.storage.runview import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What a drop hid, or would hide."""

    run: str
    step: int
    attempt: int
    reference: str
    """What means it as long as it is visible."""
    commit: str
    """The hidden one."""
    hidden_by: str
    """The record that hides it."""
    inherited_by: tuple[str, ...]
    """Visible commits of the run that have layers saved by it, and keep them, by step."""
    pins: tuple[str, ...]
    """Pins that keep it."""
    tip: str | None
    """What the run's name means without it; None where no commit is left."""
    is_tip: bool
    """Whether it is what the run's name has meant so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPlan:
    """What would be hidden, and the record that would do it."""

    outcome: Dropped
    hiding: Commit


def plan_drop(rooms: Rooms, ref: str, *, last: bool = False) -> DropPlan:
    """
    Find out what hiding the commit *ref* means; nothing is written.

    Raises:
        NotFound: There is no such commit, or it is hidden already.
        InvalidInput: *ref* is a pin, or the last commit of its attempt and *last* is False.
    """
    if hidden_by := _hiding_records(rooms, ref):
        if all(rooms.catalog.commit(row.name).record.policy.name == STAND_IN for row in hidden_by):
            hint = f"layerstore log {parse_reference(ref).name} lists what is kept"
            raise NotFound(f"{ref} was removed by a collection", hint=hint)
        raise NotFound(f"{ref} is dropped already", hint="to see it again, ingest its checkpoint again")
    resolved = resolve(rooms, ref)
    record = resolved.record
    if resolved.pin is not None:
        raise InvalidInput(
            f"{resolved.pin!r} is a pin, and drop hides commits; nothing was changed",
            hint=f"layerstore pin --delete {typed(resolved.pin)}; layerstore log {typed(record.run)} lists the commits",
        )
    view = rooms.catalog.view(record.run)
    tip = _tip_without(view, resolved.commit)
    siblings = [row for row in view.visible if row.attempt == record.attempt and row.id != resolved.commit]
    if not siblings and not last:
        raise InvalidInput(
            f"{record.run}@{record.step} is the last visible commit of attempt {record.attempt} of {record.run!r}; "
            "nothing was changed",
            hint=f"with --last it is hidden all the same; {record.run} then means {tip or 'no commit at all'}",
        )
    hiding = hiding_commit(record, CommitId(resolved.commit), policy="drop")
    outcome = Dropped(
        run=record.run,
        step=record.step,
        attempt=record.attempt,
        reference=reference_to(rooms, record),
        commit=resolved.commit,
        hidden_by=hiding.id,
        inherited_by=_inheritors(rooms, view, resolved),
        pins=tuple(pin.name for pin in rooms.records.readable_pins() if pin.base == resolved.commit),
        tip=tip,
        is_tip=_is_tip(view, resolved.commit),
    )
    return DropPlan(outcome=outcome, hiding=hiding)


def execute_drop(rooms: Rooms, ref: str, *, last: bool = False) -> Dropped:
    """
    Hide the commit *ref*; raises as `plan_drop` does.

    Once this returns a power cut cannot bring it back. If it raises, the commit is as it was.
    """
    rooms.prepare_writing()
    for earlier in _hiding_records(rooms, ref):
        rooms.records.confirm(earlier.name)  # its writer may have failed in the very last fsync
    run = plan_drop(rooms, ref, last=last).outcome.run
    with rooms.lock_run(run):
        # Again: whoever held the lock may have saved or dropped.
        plan = plan_drop(rooms, ref, last=last)
        _check_collections(rooms, plan, last=last)  # so that what can be seen now costs no record
        _publish(rooms, plan.hiding)
        rooms.catalog.add(plan.hiding)
        _look_again(rooms, plan, last=last)
    return plan.outcome


def _look_again(rooms: Rooms, plan: DropPlan, *, last: bool) -> None:
    """
    Find out what a collection has done meanwhile, which waits for nobody.

    It writes its plan and then looks at what shows, and removes nothing on account of a commit that does not show any
    more. Here that commit is hidden first, and then plans are looked at: so one of the two sees the other.
    """
    outcome = plan.outcome
    for row in rooms.catalog.view(outcome.run).of_attempt(outcome.attempt):
        if outcome.commit in row.supersedes:  # the same without moments
            hiding = hiding_commit(rooms.catalog.commit(row.name).record, row.id, policy="drop")
            _publish(rooms, hiding)
            rooms.catalog.add(hiding)
    try:
        _check_collections(rooms, plan, last=last)
    except Conflict:
        take_back(rooms, plan.hiding)
        raise


def _check_collections(rooms: Rooms, plan: DropPlan, *, last: bool) -> None:
    """
    Make sure that what is to be left without the commit is not being removed.

    Raises:
        Conflict: Of the attempt nothing would be left, or with *last* nothing of a run that is to have other commits.
    """
    outcome = plan.outcome
    if last and outcome.tip is None:
        return
    view = rooms.catalog.view(outcome.run)
    going = {name for each in rooms.garbage.unfinished(rooms.records.is_there) for name in names_in(each)}
    left = [
        row
        for row in (view.visible if last else view.of_attempt(outcome.attempt))
        if row.id != outcome.commit and outcome.commit not in row.supersedes and row.name not in going
    ]
    if not left:
        of = f"run {outcome.run!r}" if last else f"attempt {outcome.attempt} of {outcome.run!r}"
        raise Conflict(
            f"a collection removes all other commits of {of}, or was stopped while it did; "
            f"{outcome.reference} was not dropped",
            hint=f"layerstore gc finishes it; layerstore log {typed(outcome.run)} shows what is left then",
        )


def give_up(rooms: Rooms, ref: str, *, dry_run: bool = False) -> tuple[str, ...]:
    """
    Give up the records of *ref* that a repair has put into quarantine; return their commits' ids.

    They stay where they are, and hold collections back no longer.

    Raises:
        NotFound: None is there, or all were given up.
    """
    if not dry_run:
        rooms.prepare_writing()
    found = records_meant(rooms, ref)
    for lost in found if not dry_run else ():
        rooms.quarantine.give_up(lost.path)
    return tuple(dict.fromkeys(lost.name.id for lost in found))


def _publish(rooms: Rooms, hiding: Commit) -> None:
    record = hiding.record
    try:
        rooms.records.publish(hiding)
    except StorageIO as exc:
        if rooms.records.is_there(rooms.records.name_of(hiding)):
            # Not "repeat the command": RUN means another commit now.
            exc.hint = f"layerstore drop {typed(f'{record.run}@{record.step}')} confirms it, once the disk is well"
        raise


def _hiding_records(rooms: Rooms, ref: str) -> list[RecordRow]:
    """Return the records that hide the step of *ref*, if it names one and nothing visible is there."""
    reference = parse_reference(ref)
    if reference.step is None or not rooms.records.names(reference.name):
        return []
    view = rooms.catalog.view(reference.name)
    if any(row.step == reference.step for row in view.visible):
        return []
    hidden = view.hidden
    return [
        row for row in view.rows.values() if row.step == reference.step and not row.layer_names and row.id not in hidden
    ]


def _is_tip(view: RunView, commit: str) -> bool:
    attempts = view.attempts  # none is left where a collection has taken the commit meanwhile
    return bool(attempts) and next(view.history(attempts[-1])).id == commit


def _tip_without(view: RunView, commit: str) -> str | None:
    attempts = {row.attempt for row in view.visible if row.id != commit}
    if not attempts:
        return None
    left = next(row for row in view.history(max(attempts)) if row.id != commit)
    return f"{view.run}@{left.step}"


def _inheritors(rooms: Rooms, view: RunView, resolved: Resolved) -> tuple[str, ...]:
    """Return the visible commits that took layers over from *resolved*, as their users call them."""
    source = resolved.record
    own = (source.run, source.attempt, source.step, source.save_number)
    found = []
    for row in view.visible:
        if row.id == resolved.commit or row.step < source.step:
            continue
        try:
            origins = [entry.origin for entry in rooms.catalog.commit(row.name).record.layers]
        except NotFound:
            continue  # a collection has just removed it
        except IntegrityError:
            continue  # verify reports it; what it had keeps nobody from hiding this one
        if any((origin.run, origin.attempt, origin.step, origin.save_number) == own for origin in origins):
            found.append(row)
    return tuple(references_to(rooms, found))
