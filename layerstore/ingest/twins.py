"""Whether checkpoints that were just saved are stored as another run already: under the name of another folder."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from layerstore.errors import LayerstoreError
from layerstore.model import CommitRecord
from layerstore.ingest.execute import Ingested
from layerstore.storage.rooms import Rooms
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow


def stored_as(rooms: Rooms, saved: Iterable[Ingested]) -> dict[tuple[str, str], int]:
    """
    Return how many of the commits *saved* another run has too, at the same step; by their run and the other.

    Each run is looked at once, and records are read only at the steps of what has brought no byte that is new.
    """
    suspects = [each for each in saved if each.is_new and not each.bytes_new]
    by_step: dict[int, list[RecordRow]] = defaultdict(list)
    for run in rooms.catalog.runs() if suspects else ():
        view = rooms.catalog.find(run)
        for row in [] if view is None else view.visible:
            by_step[row.step].append(row)
    found: Counter[tuple[str, str]] = Counter()
    for each in suspects:
        own = _record(rooms, RecordName(each.run, each.step, each.commit))
        others = [row for row in by_step[each.step] if row.run != each.run]
        runs = {row.run for row in others if own and _is_same(own, _record(rooms, row.name))}
        found.update((each.run, run) for run in runs)
    return dict(found)


def _record(rooms: Rooms, name: RecordName) -> CommitRecord | None:
    try:
        return rooms.catalog.commit(name).record
    except LayerstoreError:
        return None  # collected meanwhile, or damaged, which others tell


def _is_same(own: CommitRecord, other: CommitRecord | None) -> bool:
    """Whether *other* has all that *own* has saved."""
    if other is None:
        return False
    theirs = {entry.layer: entry.version for entry in other.layers}
    saved = [entry for entry in own.layers if entry.saved_by(own)]
    return own.states == other.states and all(theirs.get(entry.layer) == entry.version for entry in saved)
