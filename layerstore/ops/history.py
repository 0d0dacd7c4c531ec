"""A run's saves as policies look at them: newest first, below a fork those of the attempt it left."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from layerstore.errors import Conflict, LayerstoreError, NotFound
from layerstore.model import CommitRecord, LayerEntry
from layerstore.ops.refs import history_of
from layerstore.ops.rooms import Rooms
from layerstore.storage.catalog import RunView
from layerstore.storage.manifest import RecordRow


@dataclass(slots=True)
class PastSave:
    """One save: its record, read when it is looked at."""

    rooms: Rooms
    row: RecordRow | None
    """None for a base, whose record is at hand."""
    read: CommitRecord | None = None

    @property
    def record(self) -> CommitRecord:
        """The record, checked."""
        if self.read is None:
            assert self.row is not None
            self.read = self.rooms.catalog.commit(self.row.name).record
        return self.read

    @property
    def save_number(self) -> int:
        """Its number."""
        return self.record.save_number if self.row is None else self.row.save_number

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Every layer, in the model's order."""
        return tuple(entry.layer for entry in self.record.layers)

    @property
    def counted(self) -> list[bool]:
        """Of every layer, whether the optimizer had counted an update of it."""
        return [entry.optimizer_step is not None for entry in self.record.layers]

    def entry(self, layer: str) -> LayerEntry:
        """Return what the record says of *layer*."""
        return next(entry for entry in self.record.layers if entry.layer == layer)


def saves_from(rooms: Rooms, base: CommitRecord) -> Iterator[PastSave]:
    """Yield *base* and the saves before it in its history, newest first."""
    yield PastSave(rooms, None, base)
    try:
        view = rooms.catalog.view(base.run)
    except NotFound:
        return  # a pin that outlived its run
    yield from saves_below(rooms, view, attempt=base.attempt, step=base.step)


def saves_below(rooms: Rooms, view: RunView, *, attempt: int, step: int) -> Iterator[PastSave]:
    """Yield the saves of *attempt*'s history below *step*, newest first."""
    rows = [row for row in history_of(view, attempt) if row.step < step]
    _check_damage(view, step)
    for older, newer in pairwise(rows):
        if (older.step, older.attempt) == (newer.step, newer.attempt):
            raise Conflict(
                f"{view.run}@{older.step} is ambiguous: commits {older.id[:12]}, {newer.id[:12]} stand side by side",
                hint="ingest the right one again with --replace",
            )
    for row in reversed(rows):
        yield PastSave(rooms, row)


def _check_damage(view: RunView, step: int) -> None:
    """Raise if a record below *step* cannot be read: what it holds, or hides, might be what a policy asks for."""
    problems: list[tuple[int, LayerstoreError]] = [
        (name.step, problem) for name, problem in view.damaged.items() if name.step < step
    ]
    if problems:
        raise max(problems, key=lambda each: each[0])[1]
