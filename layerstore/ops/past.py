"""A run's saves as policies look at them: newest first, below a fork those of the attempt it left."""

from collections.abc import Iterator

from layerstore.errors import Conflict, NotFound
from layerstore.model import Commit, CommitId, Observed
from layerstore.ops.refs import Resolved
from layerstore.ops.rooms import Rooms
from layerstore.storage.manifest import RecordRow, row_of
from layerstore.storage.runview import RunView


def numbers_above(view: RunView | None, *, attempt: int, step: int) -> frozenset[int]:
    """Return the numbers of *attempt*'s saves after *step*: what was filled in below them is no gap."""
    rows = [] if view is None else view.of_attempt(attempt)
    return frozenset(row.save_number for row in rows if row.step > step)


def view_or_none(rooms: Rooms, run: str) -> RunView | None:
    """Return what *run* holds; None where it holds nothing, or nothing any more."""
    try:
        return rooms.catalog.view(run)
    except NotFound:
        return None


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
