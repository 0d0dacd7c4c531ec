"""A run's saves as policies look at them: newest first, below a fork those of the attempt it left."""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import TypeVar

from layerstore.errors import Conflict, NotFound
from layerstore.model import Commit, CommitId, CommitRecord, LayerEntry, Observed, Origin, Saving
from layerstore.ops.refs import Resolved
from layerstore.ops.resumed import resumed_layers
from layerstore.ops.rooms import Rooms
from layerstore.policy import Policy
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow, row_of
from layerstore.storage.runview import RunView

Answer = TypeVar("Answer")


Turns = Mapping[tuple[int, int], int]
"""The numbers that policies count saves of a run by, where these are not those of their records; see `RunView`."""


def turns_of(view: RunView | None) -> Turns:
    """Return how the saves of *view* are counted."""
    return {} if view is None else view.turns


def turn_of(save: CommitRecord | RecordRow | Origin, turns: Turns) -> int:
    """Return the number that *save*, one of the run that *turns* are of, is counted by."""
    return turns.get((save.attempt, save.step), save.save_number)


def numbers_above(view: RunView | None, *, attempt: int, step: int) -> frozenset[int]:
    """Return the numbers of *attempt*'s saves after *step*: what was filled in below them is no gap."""
    rows = [] if view is None else view.of_attempt(attempt)
    return frozenset(turn_of(row, turns_of(view)) for row in rows if row.step > step)


def saved_at(rooms: Rooms, save: Saving) -> RecordName | None:
    """Return the record that *save* shows by; None where it is hidden or gone."""
    view = rooms.catalog.find(save.run)
    rows = [] if view is None else view.of_attempt(save.attempt)
    return next((row.name for row in rows if row.step == save.step), None)


def asked_again(rooms: Rooms, run: str, ask: Callable[[RunView | None], Answer]) -> Answer:
    """
    Return what *ask* makes of *run*, asked once more where a collection has taken what it relied on.

    Writers and collections keep each other waiting for nothing: so a commit may be gone between a look and the next.
    """
    while True:
        view = rooms.catalog.find(run)
        try:
            return ask(view)
        except NotFound:
            now = rooms.catalog.find(run)
            if view is None or (now is not None and now.rows.keys() >= view.rows.keys()):
                raise


def saves_from(view: RunView | None, base: Resolved) -> Iterator[RecordRow]:
    """Yield *base* and the saves before it in its history, newest first; a pin may have outlived its run."""
    record = base.record
    yield row_of(
        Commit(
            id=CommitId(base.commit),
            record=record,
            observed=Observed(time_ns=base.time_ns, bytes_new=0, bytes_reused=0),
        )
    )
    if view is not None:
        yield from saves_below(view, attempt=record.attempt, step=record.step)


def saves_below(view: RunView, *, attempt: int, step: int) -> Iterator[RecordRow]:
    """
    Yield the saves of *attempt*'s history below *step*, newest first.

    Raises:
        IntegrityError: A record below *step* cannot be read: what it holds, or hides, might be what is asked for.
        Conflict: Two commits of one step stand side by side.
    """
    problems = {name.step: problem for name, problem in view.damaged.items() if name.step < step}
    if problems:
        raise problems[max(problems)]
    newer: RecordRow | None = None
    for row in view.history(attempt, step=step - 1):
        if newer is not None and (newer.step, newer.attempt) == (row.step, row.attempt):
            raise Conflict(
                f"{view.run}@{row.step} is ambiguous: commits {newer.id[:12]}, {row.id[:12]} stand side by side",
                hint="ingest the right one again with --replace",
            )
        yield row
        newer = row


class Past:
    """
    The saves up to a base, newest first, as far as somebody has looked back.

    Where an attempt went on from a composite that is the last of them, and nothing older has a part in it.
    """

    def __init__(self, rooms: Rooms, resolved: Resolved, *, view: RunView | None) -> None:
        self._rooms = rooms
        self._base = resolved
        self._view = view
        self._seen: list[RecordRow] = []
        self._resumed: dict[str, LayerEntry] = {}

    def saves(self) -> Iterator[RecordRow]:
        """Yield them."""
        turns = turns_of(self._view)
        for row in saves_from(self._view, self._base):
            save = row._replace(save_number=turn_of(row, turns)) if turns else row
            if self._seen and save.attempt != self._seen[-1].attempt and (yield from self._beginning()):
                return
            self._seen.append(save)
            yield save
        yield from self._beginning()

    def _beginning(self) -> Generator[RecordRow, None, bool]:
        """Yield the composite that the attempt just left went on from, if that was one."""
        found = None if self._view is None else resumed_layers(self._rooms, self._view, self._seen[-1].attempt)
        if found is not None:
            self._seen.append(found[0])
            self._resumed = {entry.layer: entry for entry in found[1]}
            yield found[0]
        return found is not None

    def _is_resumed(self, position: int) -> bool:
        return bool(self._resumed) and position == len(self._seen) - 1

    def numbers_above(self, position: int) -> Collection[int]:
        """Return the numbers of the saves after the one at *position*, in its attempt."""
        row = self._seen[position]
        return numbers_above(self._view, attempt=row.attempt, step=row.step)

    def resumed_numbers(self, position: int) -> dict[str, int] | None:
        """Return the numbers of this run's saves that the composite at *position* comes from, None if it is a save."""
        if not self._is_resumed(position):
            return None
        run = self._base.record.run
        turns = turns_of(self._view)
        own = {name: entry.origin for name, entry in self._resumed.items() if entry.origin.run == run}
        return {name: turn_of(origin, turns) for name, origin in own.items()}

    def decided(self, position: int, policy: Policy) -> frozenset[str] | None:
        """Return what *policy* decided at the save of *position*, as far as it is on record."""
        if self._is_resumed(position):
            return frozenset(self._resumed)  # training began with all of these
        if position == 0:
            return _decided(self._base.record, policy)
        return _decided(self._rooms.catalog.commit(self._seen[position].name).record, policy)

    def entries(self, position: int, names: Collection[str]) -> dict[str, LayerEntry]:
        """Return what the save of *position* says of the layers *names*, by its row; `Catalog.check` reads it."""
        if self._is_resumed(position):
            return {name: self._resumed[name] for name in names}
        if position == 0:
            return {entry.layer: entry for entry in self._base.record.layers if entry.layer in names}
        return self._seen[position].entries(names)

    def is_older(self, entry: LayerEntry, position: int) -> bool:
        """Whether the layer was due at the save of *position*, and has no version there."""
        return not self._is_resumed(position) and not entry.saved_by(self._seen[position])


def _decided(record: CommitRecord, policy: Policy) -> frozenset[str] | None:
    """Return what *policy* decided at the save of *record*, None where that was saved under another."""
    due = record.policy.decisions.get("due")
    return frozenset(map(str, due)) if record.policy.name == policy.name and isinstance(due, list) else None
