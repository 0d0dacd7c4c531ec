"""
Where a new commit stands in its run: its attempt and number, and what it inherits if it does not save everything.

Nothing is written here. The caller holds the run's lock, or the attempt's (``seats.py``).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from layerstore.errors import Conflict, IntegrityError, InvalidInput
from layerstore.model import BlobRef, CommitId, CommitRecord, Fork, LayerEntry, Origin, PolicyUse
from layerstore.history.past import Turns, numbers_above, saves_below, turn_of
from layerstore.history.references import resolve
from layerstore.history.resumed import resumed_decision
from layerstore.storage.rooms import Rooms
from layerstore.policy import Latest
from layerstore.policy.replay import missing_between
from layerstore.storage.manifest import RecordRow
from layerstore.storage.runview import RunView
from layerstore.tree import Tree
from layerstore.zero3.checkpoint import LayerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a commit stands."""

    attempt: int
    fork: Fork | None
    save_number: int
    inherited: Mapping[str, LayerEntry]
    """What its history has of every layer; empty where nothing lies before it."""
    unseen: tuple[int, ...] = ()
    """Numbers of saves since then that never became visible, or were dropped."""
    supersedes: tuple[CommitId, ...] = ()
    turns: Turns = field(default_factory=dict)
    """How the saves are counted that it inherits from."""
    after: int | None = None
    """The step of the run that the next one has to come after; None where nothing of it was taken up."""
    decisions: Mapping[Tree, Tree] = field(default_factory=dict)
    """What the attempt's first record says of how it began."""


def place_begun(view: RunView | None) -> Place:
    """Return the place of a training that begins from nothing, whatever the run has already."""
    return Place(attempt=1 + _newest_number(view), fork=None, save_number=0, inherited={})


def place_after(view: RunView | None, record: CommitRecord, *, of_commit: str, is_as_it_stands: bool) -> Place:
    """
    Return the place of what goes on from *record*, that of the commit *of_commit* or a composite based on it.

    At the tip of the newest attempt that attempt goes on; anywhere else the next one begins, and so it does where
    the composite's layers are not the commit's own.
    """
    newest = None if view is None else next(view.history(newest_attempt(view)), None)
    if view is None or newest is None or newest.id != of_commit or not is_as_it_stands:
        return replace(_fork(view, record), decisions={} if is_as_it_stands else resumed_decision(record.layers))
    own = [row for row in view.rows.values() if row.attempt == newest_attempt(view)]
    return Place(
        attempt=newest_attempt(view),
        fork=view.fork_of(newest_attempt(view)),
        save_number=1 + max(row.save_number for row in own),
        inherited=_by_layer(record),
        turns=view.turns,
        after=record.step,
    )


def place_free(view: RunView | None, place: Place, taken: Collection[int]) -> Place:
    """Return *place*, or one like it in the next attempt that is free where its own is *taken* by another job."""
    if place.attempt not in taken:
        return place
    found = place_at(view, place, 1 + max(_newest_number(view), *taken))
    assert found is not None, "nothing is in an attempt behind all others"
    return found


def place_at(view: RunView | None, place: Place, attempt: int) -> Place | None:
    """Return *place*, or one like it in *attempt*; None where others have saved that, or one behind it."""
    if place.attempt == attempt:
        return place
    if attempt <= _newest_number(view):
        return None
    goes_on = view is not None and bool(view.of_attempt(place.attempt))
    if not goes_on:
        return replace(place, attempt=attempt)
    assert place.after is not None, "what goes on has something before it"
    return replace(place, attempt=attempt, fork=Fork(attempt=place.attempt, step=place.after))


def place_beside(rooms: Rooms, rival: RecordRow) -> tuple[Place, PolicyUse]:
    """Return the place of *rival*, for a commit that may turn out to be the same, and the policy it was saved under."""
    inherited: dict[str, LayerEntry] = {}
    policy = PolicyUse(name=Latest.name, parameters={}, decisions={})
    try:
        record = rooms.catalog.commit(rival.name).record
    except IntegrityError:
        # Of a full save the index knows enough to make the record again, and so to heal it.
        if not all(rival.saved):
            raise
    else:
        inherited = {entry.layer: entry for entry in record.layers if not entry.saved_by(record)}
        policy = record.policy
    place = Place(
        attempt=rival.attempt,
        fork=rival.fork,
        save_number=rival.save_number,
        inherited=inherited,
        supersedes=rival.supersedes,
    )
    return place, policy


def place_of(
    rooms: Rooms, view: RunView | None, *, step: int, rivals: list[RecordRow], rollback: bool, resumed_from: str | None
) -> Place:
    """
    Return where a new commit at *step* goes: into the newest attempt, or into one that it opens.

    Raises:
        InvalidInput: It says that training went back, and it did not.
    """
    if resumed_from is not None:
        return _resumed(rooms, view, step=step, ref=resumed_from)
    if view is not None and view.damaged and not rooms.records.names(view.run):
        raise next(iter(view.damaged.values()))  # its numbers are taken, wherever its records have gone
    if view is None or not view.rows:
        return Place(attempt=1, fork=None, save_number=0, inherited={})
    attempt = newest_attempt(view)
    newest = next(saves_below(view, attempt=attempt, step=step), None)
    before = None if newest is None else rooms.catalog.commit(newest.name).record
    if rollback:
        return _after_rollback(view, step=step, before=before)
    own = [row for row in view.rows.values() if row.attempt == attempt]
    dropped = [] if rivals else _dropped(view, attempt, step)
    number = _number(view, own, rivals=rivals, dropped=dropped, step=step)
    return Place(
        attempt=attempt,
        fork=own[0].fork,
        save_number=number,
        inherited={} if before is None else _by_layer(before),
        unseen=()
        if before is None
        else missing_between(turn_of(before, view.turns), number, numbers_above(view, attempt=attempt, step=step)),
        turns=view.turns,
        supersedes=tuple(sorted(CommitId(row.id) for row in rivals or dropped)),
    )


def _number(
    view: RunView, own: list[RecordRow], *, rivals: list[RecordRow], dropped: list[RecordRow], step: int
) -> int:
    """Return the number of a save at *step*: of what it stands in for, if anything, or the next."""
    if rivals:
        return rivals[0].save_number
    below = (row.save_number for row in own if row.step < step and row.id not in view.hidden)
    if dropped and dropped[0].save_number > max(below, default=-1):
        return dropped[0].save_number  # as long as nothing was saved below it since: numbers grow with the steps
    # Hidden ones count too: a number is given once. What is filled in later comes later in the count.
    return 1 + max(row.save_number for row in own)


def newest_attempt(view: RunView) -> int:
    """Return the attempt that goes on: the newest that has commits, or had any where all are dropped."""
    return view.attempts[-1] if view.attempts else _newest_number(view)


def _newest_number(view: RunView | None) -> int:
    return 0 if view is None else max((row.attempt for row in view.rows.values()), default=0)


def _dropped(view: RunView, attempt: int, step: int) -> list[RecordRow]:
    """Return the records that hide *step* and nothing else, unless something was saved there since."""
    rows = (row for row in view.rows.values() if (row.step, row.attempt) == (step, attempt))
    return [row for row in rows if not row.layer_names and row.id not in view.hidden]


def _after_rollback(view: RunView, *, step: int, before: CommitRecord | None) -> Place:
    tip = max((row.step for row in view.of_attempt(newest_attempt(view))), default=step)
    if step > tip:
        raise InvalidInput(
            f"--rollback: step {step} is after {view.run}@{tip}, the newest: training did not go back",
            hint="leave --rollback out",
        )
    return Place(
        attempt=1 + _newest_number(view),
        fork=None if before is None else Fork(attempt=newest_attempt(view), step=before.step),
        save_number=0 if before is None else turn_of(before, view.turns) + 1,
        inherited={} if before is None else _by_layer(before),
        turns=view.turns,
    )


def _resumed(rooms: Rooms, view: RunView | None, *, step: int, ref: str) -> Place:
    """Open an attempt that inherits what training was resumed from: a composite's own layers, not its base's."""
    record = resolve(rooms, ref).record
    is_of_run = view is not None and record.run == view.run
    if view is not None and view.attempts and not is_of_run:
        raise InvalidInput(
            f"--resumed-from {ref} is of run {record.run!r}, and {view.run!r} has commits already",
            hint="only a new run can begin from another one's commit",
        )
    if is_of_run and step <= record.step:
        raise InvalidInput(
            f"--resumed-from {ref} is step {record.step}, and the checkpoint is of step {step}: not after it",
            hint="name the commit or composite that training went on from",
        )
    return _fork(view, record)


def _fork(view: RunView | None, record: CommitRecord) -> Place:
    """Open the attempt that goes on from *record*, or the first one of another run than its own."""
    if view is None or record.run != view.run:
        return Place(attempt=1 + _newest_number(view), fork=None, save_number=0, inherited=_by_layer(record))
    return Place(
        attempt=1 + _newest_number(view),
        fork=Fork(attempt=record.attempt, step=record.step),
        save_number=turn_of(record, view.turns) + 1,
        inherited=_by_layer(record),
        turns=view.turns,
        after=record.step,
    )


def entries_of(
    layers: Iterable[LayerSource],
    *,
    due: Collection[str],
    versions: Mapping[str, BlobRef],
    origin: Origin,
    inherited: Mapping[str, LayerEntry],
) -> tuple[LayerEntry, ...]:
    """Return what a record says of *layers*: the new versions of those that were *due*, and what it inherits."""
    return tuple(
        LayerEntry(layer=of.layer, version=versions[of.layer], origin=origin, optimizer_step=of.optimizer_step)
        if of.layer in due
        else inherited[of.layer]
        for of in layers
    )


def _by_layer(record: CommitRecord) -> dict[str, LayerEntry]:
    return {entry.layer: entry for entry in record.layers}


def own_numbers(place: Place, run: str) -> dict[str, int]:
    """Return the number of each inherited layer's save, where *run* counts on from it: others are no ages."""
    origins = {layer: entry.origin for layer, entry in place.inherited.items() if entry.origin.run == run}
    numbers = {layer: turn_of(origin, place.turns) for layer, origin in origins.items()}
    return {layer: number for layer, number in numbers.items() if number < place.save_number}


def opens_the_same(view: RunView | None, rival: RecordRow, place: Place) -> bool:
    """Whether *rival* began its attempt just where *place* would: then the command was merely repeated."""
    if view is None:
        return False
    steps = (None if fork is None else fork.step for fork in (rival.fork, place.fork))
    return rival.id == view.of_attempt(rival.attempt)[0].id and len(set(steps)) == 1


def elsewhere(view: RunView | None, step: int) -> list[RecordRow]:
    """Return the visible commits of *step* in other attempts than the newest."""
    if view is None:
        return []
    newest = newest_attempt(view)
    return [row for row in view.visible if row.step == step and row.attempt != newest]


def check_not_abandoned(view: RunView | None, row: RecordRow) -> None:
    """Raise Conflict if *row* is not in the newest attempt's history: saving it there would bring it back."""
    if view is None or any(other.id == row.id for other in view.history(newest_attempt(view), step=row.step)):
        return
    raise Conflict(
        f"{view.run}@{row.step} belongs to attempt {row.attempt}, which training has left; nothing was changed",
        hint="leave this checkpoint out, or pass --rollback if training took it up again",
    )


def rows_at(view: RunView | None, step: int) -> list[RecordRow]:
    """Return the visible commits of *step* in the newest attempt."""
    if view is None:
        return []
    newest = newest_attempt(view)
    return [row for row in view.visible if row.step == step and row.attempt == newest]
