"""
An ingest at a step whose record is lost: is it the very commit again, does it take its place, or neither?

What the lost record needed is not known, so collections are held back. Its id is known, and that is the hash of all
that it said. If this checkpoint makes a record of that id, it is the lost one, and it is back. If not, the user's
word decides: what is replaced goes at the next collection, as every replaced commit does, and that is said.
"""

import errno as errnos
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from layerstore.errors import LayerstoreError, StorageIO
from layerstore.format.records import commit_id
from layerstore.model import Commit, CommitId, CommitRecord, PolicyUse
from layerstore.check.given_up import is_hidden, lost_at
from layerstore.check.healing import Healing
from layerstore.history.place import Place, newest_attempt
from layerstore.storage.rooms import Rooms
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow
from layerstore.storage.runview import RunView

# Numbers that a lost commit may have had: each is tried out by hashing a record.
_NUMBERS_MAX = 128


def very_record(
    rooms: Rooms,
    lost: Iterable[RecordName],
    *,
    beside: Place,
    made: Callable[[Place, PolicyUse | None], CommitRecord | None],
) -> CommitRecord | None:
    """
    Return one of the *lost* records as it was, if it can be *made* of this checkpoint; None if it cannot.

    *made* says what the record would be at a place and under a policy, by default the one that was asked for.
    Where no copy says which these were, places *beside* that of the new commit are tried out.
    """
    healing = Healing(rooms, ())
    for name in lost:
        found = healing.record(name)
        if found is not None:
            record = found[0].record
            tried: Iterable[CommitRecord | None] = [made(_place_in(record), record.policy)]
        else:
            view = rooms.catalog.find(name.run)
            tried = (made(place, None) for place in _places_lost(view, beside, step=name.step))
        for each in tried:
            if each is not None and commit_id(each) == name.id:
                return each
    return None


def rivals_of(view: RunView | None, record: CommitRecord) -> list[RecordRow]:
    """Return the visible commits at the place of the lost *record*, but for itself and what it had hidden."""
    if view is None:
        return []
    own = {commit_id(record), *record.supersedes}
    return [row for row in view.of_attempt(record.attempt) if row.step == record.step and row.id not in own]


def replacing(record: CommitRecord, others: Iterable[CommitId]) -> CommitRecord:
    """Return *record* as one that hides *others* too."""
    return replace(record, supersedes=tuple(sorted({*record.supersedes, *others})))


def of_attempt(rooms: Rooms, lost: Iterable[RecordName], attempt: int) -> list[RecordName]:
    """Return those of the *lost* that are of *attempt*, or may be: a copy or the index says whose they were."""
    healing = Healing(rooms, ())

    def is_of_it(name: RecordName) -> bool:
        found, view = healing.record(name), rooms.catalog.find(name.run)
        known = found[0].record if found is not None else None if view is None else view.rows.get(name.id)
        return known is None or known.attempt == attempt

    return [name for name in lost if is_of_it(name)]


def as_first_saved(rooms: Rooms, commit: Commit) -> Commit:
    """Return *commit*, whose record is damaged or lost, as a copy has it: it was not saved just now."""
    found = Healing(rooms, ()).record(rooms.records.name_of(commit))
    return commit if found is None else found[0]


def keep_damaged(rooms: Rooms, name: RecordName) -> None:
    """Keep what is left of the record *name* in quarantine: it is about to be written again."""
    path = rooms.layout.record(name.run, name.step, name.id)
    quarantine_id = rooms.quarantine.begin(
        path, kind="record", reason="it was damaged, and an ingest has written it again"
    )
    take = rooms.quarantine.keep if rooms.files.is_file(path) else rooms.quarantine.move
    try:
        take(path, quarantine_id=quarantine_id)
    except StorageIO as exc:
        if exc.errno != errnos.ENOENT:
            raise
        # A repair has just taken it: it lies in quarantine, and that is all that is asked for.


def what_became_of(rooms: Rooms, lost: Iterable[RecordName]) -> Iterator[str]:
    """Say what became of records that were *lost* before an ingest: nothing that they named goes in silence."""
    for name in lost:
        view = rooms.catalog.find(name.run)
        called = f"{name.run}@{name.step} (commit {name.id[:12]}), whose record was lost,"
        if is_hidden(rooms, name):
            # A collection stops at any record that cannot be read: whom it names can only be told once it is aside.
            first = view is not None and name in view.damaged
            yield f"{called} is replaced: what it alone had named goes with the next gc" + (
                ", which removes nothing until layerstore repair has run" if first else ""
            )
        elif name in lost_at(rooms, name.run, name.step):
            yield (
                f"{called} is not known to be the same, and goes on to hold gc back; --replace, in its own attempt, "
                f"says that it may go{_how_it_was_saved(rooms, name)}"
            )


def partly_saved_under(rooms: Rooms, name: RecordName) -> str | None:
    """
    Return the policy under which the record *name*, sound or lost, had left layers out.

    ``POLICY`` where only the index knows of it, which does not know the policy; None where it left none out, or where
    nothing is known of it.
    """
    try:
        record = rooms.records.read(name).record
    except LayerstoreError:
        found, view = Healing(rooms, ()).record(name), rooms.catalog.find(name.run)
        if found is None:
            row = None if view is None else view.rows.get(name.id)
            return "POLICY" if row is not None and not all(row.saved) else None
        record = found[0].record
    return record.policy.name if not all(entry.saved_by(record) for entry in record.layers) else None


def _how_it_was_saved(rooms: Rooms, name: RecordName) -> str:
    policy = partly_saved_under(rooms, name)
    if policy is None:
        return ""
    return f", and with --policy {policy}, under which it was saved, it brings it back if this is its checkpoint"


def _place_in(record: CommitRecord) -> Place:
    """Return the place that *record* has, for a commit that may turn out to be the same."""
    return Place(
        attempt=record.attempt,
        fork=record.fork,
        save_number=record.save_number,
        inherited={entry.layer: entry for entry in record.layers if not entry.saved_by(record)},
        supersedes=record.supersedes,
    )


def _places_lost(view: RunView | None, place: Place, *, step: int) -> Iterator[Place]:
    """
    Yield what may have been the place of a commit of *step* whose record is lost, each like *place* in all else.

    In the attempts that the newest one's history runs through there: numbers that no other save has, those next to the
    save before first, and what it may have hidden.
    """
    attempt: int | None = 1 if view is None or not view.rows else newest_attempt(view)
    while attempt is not None:
        own = [] if view is None else [row for row in view.rows.values() if row.attempt == attempt]
        taken = {row.save_number for row in own if row.step != step}
        before = max((row.save_number for row in own if row.step < step), default=-1)
        free = [number for number in range(max(taken, default=-1) + _NUMBERS_MAX) if number not in taken]
        here = [row for row in own if row.step == step]
        hidden = [[], [row for row in here if row.layer_names], [row for row in here if not row.layer_names]]
        supersedes = dict.fromkeys(tuple(sorted(CommitId(row.id) for row in rows)) for rows in hidden)
        fork = None if view is None else view.fork_of(attempt)
        for number in sorted(free, key=lambda number: abs(number - before))[:_NUMBERS_MAX]:
            for ids in supersedes:
                yield replace(place, attempt=attempt, fork=fork, save_number=number, supersedes=ids)
        attempt = fork.attempt if fork is not None and step <= fork.step else None
