"""
Dropping moments: commits without them take the places of others, beside everything else that uses the store.

Nothing is removed here. Each is one link, and hides the commit that it stands in for.
"""

import contextlib
import errno
from collections.abc import Iterable
from dataclasses import dataclass, field

from layerstore.errors import Conflict, LayerstoreError, Locked, StorageIO
from layerstore.limits import GC_RESERVE_BYTES, GC_RESERVE_LAYER_BYTES, GC_RESERVE_RECORD_BYTES
from layerstore.model import CommitId
from layerstore.publish.claims import claim, publish
from layerstore.publish.hiding import withdraw
from layerstore.gc.retention import Fate, RunPlan
from layerstore.storage.rooms import Rooms
from layerstore.gc.trim import plan_trim
from layerstore.storage.holders import Hold
from layerstore.storage.manifest import RecordRow
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.runview import RunView


@dataclass(slots=True)
class Trimming:
    """Which commits have lost their moments, and what has kept others from it."""

    done: dict[CommitId, CommitId] = field(default_factory=dict)
    """What has taken the place of each."""
    problem: LayerstoreError | None = None
    """To be raised once all else is collected: that makes room."""

    def was_left(self, fate: Fate) -> bool:
        """Whether *fate* was to lose its moments and has them still, so that its record stays."""
        return fate.loses_moments and fate.row.id not in self.done

    def now(self, fate: Fate) -> CommitId:
        """Return the commit that stands where that of *fate* stood."""
        return self.done.get(fate.row.id, fate.row.id)


def trim_all(rooms: Rooms, runs: Iterable[tuple[RunView, RunPlan]], *, hold: Hold) -> Trimming:
    """
    Publish what takes the place of commits that lose their moments, one by one: together they would fill the memory.

    What has been dropped or replaced since the plan is left as it is. So is the rest where a disk is full or a run is
    being saved to; *hold* is the collections' lock.
    """
    found = Trimming()
    runs = list(runs)
    going = sum(fate.goes for _, run in runs for fate in run.fates)
    for view, run in runs:
        fates = [fate for fate in run.fates if fate.loses_moments]
        try:
            with rooms.lock_run(view.run) if fates else contextlib.nullcontext():
                for fate in fates:
                    hold.check()
                    if not shows_what_stays(rooms, view, run, found):
                        break  # then it is planned again: what is newest decides whose moments go
                    _check_room(rooms, fate.row, going=going)
                    if (trimmed := _trimmed(rooms, fate.row)) is not None:
                        found.done[fate.row.id] = trimmed
        except (Locked, StorageIO) as exc:
            hold.check()  # the collections' own lock is no such matter
            if isinstance(exc, StorageIO) and exc.kind != "no_space":
                raise
            found.problem = _with_hint(exc)
    return found


def shows_what_stays(rooms: Rooms, view: RunView, run: RunPlan, trimming: Trimming) -> bool:
    """Whether every commit of *view* shows that *run* keeps, or what stands in its place."""
    fresh = rooms.catalog.find(view.run)
    shown = set() if fresh is None else {row.id for row in fresh.visible}
    return shown >= {trimming.now(fate) for fate in run.fates if fate.is_visible and fate.kept_by}


def _check_room(rooms: Rooms, row: RecordRow, *, going: int) -> None:
    """Raise StorageIO where the disk has no room for another record with its blobs, and a plan of all *going*."""
    free = rooms.files.free_bytes(rooms.layout.root)
    of_plan = GC_RESERVE_BYTES // 2 + GC_RESERVE_RECORD_BYTES * going
    if free < of_plan + GC_RESERVE_LAYER_BYTES * len(row.layer_names):
        raise StorageIO(
            f"no room to drop the moments of {row.run}@{row.step}: {free} bytes are free",
            errno=errno.ENOSPC,
            filename=str(rooms.layout.root),
        )


def _with_hint(problem: LayerstoreError) -> LayerstoreError:
    message = f"{problem.message}; moments were kept there, and all else was collected"
    hint = "repeat the command: what was freed makes room, and what was done is done"
    if isinstance(problem, Locked):
        return Conflict(message, hint=hint)  # the other meaning of that is another collection
    problem.message, problem.hint = message, hint
    return problem


def _trimmed(rooms: Rooms, row: RecordRow) -> CommitId | None:
    """Publish the commit without moments that hides *row*; return it, or None where something else hides that."""
    trim = plan_trim(rooms, rooms.catalog.commit(row.name))
    with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer:
        for ref, data in trim.versions.items():
            writer.put(data, ref)
        claim(rooms, writer, (), trim.commit.record.states)
        writer.publish()
        publish(rooms, writer, trim.commit)
    view = rooms.catalog.find(row.run)
    others = [] if view is None else [each for each in view.rows.values() if row.id in each.supersedes]
    if len(others) > 1:
        # Dropped or replaced at this very moment: what was to take its place would show it again.
        withdraw(rooms, trim.commit)
        return None
    return trim.commit.id
