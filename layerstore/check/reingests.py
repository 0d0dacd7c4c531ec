"""Which checkpoints bring back what is lost, and under which run: not each adds anything at the place it came from."""

from collections.abc import Collection, Iterable, Mapping

from layerstore.model import BlobRef, CommitId, Origin
from layerstore.ingest.brought_back import partly_saved_under
from layerstore.check.damage import Holder
from layerstore.history.past import saved_at
from layerstore.history.place import newest_attempt
from layerstore.history.references import references_to
from layerstore.check.repaired import Reingest
from layerstore.storage.rooms import Rooms
from layerstore.storage.commits import RecordName


def reingests(rooms: Rooms, holders: Collection[Holder], lost: Iterable[RecordName]) -> tuple[Reingest, ...]:
    """Return the saves that have what *holders* have lost, and those whose records are *lost*, by run and step."""
    hurt = {holder.row.id: frozenset(holder.lost) for holder in holders if holder.pin is None}
    origins = list({origin for holder in holders for origin in holder.origins})
    called = dict(zip(origins, references_to(rooms, origins), strict=True))
    found: dict[tuple[str, int, str, bool], RecordName | None] = {}
    for holder in holders:
        for origin, blobs in holder.origins.items():
            is_own = _heals_at_its_place(rooms, origin, blobs, hurt)
            found[origin.run, origin.step, called[origin], is_own] = saved_at(rooms, origin)
    found |= {(name.run, name.step, f"{name.run}@{name.step}", True): name for name in lost}
    return tuple(
        # Where the commit is gone, its checkpoint makes a new one, with all that it holds.
        Reingest(reference=reference, run=run, step=step, policy=partly_saved_under(rooms, name) if name else None)
        if is_own
        else Reingest(reference=reference, run=None, step=step, policy=None)
        for (run, step, reference, is_own), name in sorted(found.items(), key=lambda item: item[0])
    )


def _heals_at_its_place(
    rooms: Rooms, origin: Origin, blobs: frozenset[BlobRef], hurt: Mapping[CommitId, frozenset[BlobRef]]
) -> bool:
    """
    Whether the checkpoint of *origin* brings back *blobs*, which are of it, where it is ingested under its own run.

    A commit that has not lost them all, of which *hurt* says what each has lost, is another one by now: it has fallen
    back, was replaced, or has lost its moments. And what goes on in that run may be another attempt.
    """
    name, view = saved_at(rooms, origin), rooms.catalog.find(origin.run)
    if name is not None and not blobs <= hurt.get(name.id, frozenset()):
        return False
    if view is None or origin.attempt == (newest := newest_attempt(view)):
        return True
    return name is not None and all(row.step != origin.step for row in view.of_attempt(newest))
