"""A run's saves as policies look at them: newest first, below a fork those of the attempt it left."""

from collections.abc import Iterator

from layerstore.errors import Conflict, NotFound
from layerstore.model import Commit, CommitId, Observed
from layerstore.ops.refs import Resolved
from layerstore.ops.rooms import Rooms
from layerstore.storage.manifest import RecordRow, row_of
from layerstore.storage.runview import RunView


def saves_from(rooms: Rooms, base: Resolved) -> Iterator[RecordRow]:
    """Yield *base* and the saves before it in its history, newest first."""
    record = base.record
    yield row_of(
        Commit(
            id=CommitId(base.commit),
            record=record,
            observed=Observed(time_ns=base.time_ns, bytes_new=0, bytes_reused=0),
        )
    )
    try:
        view = rooms.catalog.view(record.run)
    except NotFound:
        return  # a pin that outlived its run
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
