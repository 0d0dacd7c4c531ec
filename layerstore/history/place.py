"""
Where a new commit stands in its run: its attempt and number, and what it inherits if it does not save everything.

Nothing is written here. The caller holds the run's lock, or the attempt's (`attempt_locks`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from layerstore.errors import InvalidInput
from layerstore.history.past import saves_below
from layerstore.history.references import resolve
from layerstore.model import BlobRef, CommitId, CommitRecord, Fork, LayerEntry, Origin, PolicyUse
from layerstore.storage import RecordRow, Repository, RunView
from layerstore.zero3 import LayerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a commit stands."""

    attempt: int
    lineage: tuple[Fork, ...]
    save_number: int
    inherited: Mapping[str, LayerEntry]
    """What its history has of every layer; empty where nothing lies before it."""
    supersedes: tuple[CommitId, ...] = ()
    after: int | None = None
    """The step of the run that the next one has to come after; None where it goes on from nothing of it."""

    @property
    def fork(self) -> Fork | None:
        """Where its attempt left an earlier one."""
        return self.lineage[0] if self.lineage else None


def place_begun(view: RunView | None) -> Place:
    """Return the place of a training that begins from nothing, whatever the run has already."""
    return Place(attempt=1 + newest_number(view), lineage=(), save_number=0, inherited={})


def place_after(view: RunView | None, record: CommitRecord, *, of_commit: str, is_as_it_stands: bool) -> Place:
    """
    Return the position of a run resumed from *record*: the commit *of_commit*, or a composite based on it.

    Resumed from the tip of the newest attempt as it stands, that attempt continues; otherwise a new one forks.
    """
    newest = None if view is None else next(view.history(newest_attempt(view)), None)
    if view is None or newest is None or newest.id != of_commit or not is_as_it_stands:
        return _fork(view, record)
    return Place(
        attempt=newest_attempt(view),
        lineage=view.lineage_of(newest_attempt(view)),
        save_number=record.save_number + 1,
        inherited=_by_layer(record),
        after=record.step,
    )


def place_free(view: RunView | None, place: Place, taken: Collection[int]) -> Place:
    """Return *place*, or one like it in the next free attempt if another job has *taken* its own."""
    if place.attempt not in taken:
        return place
    found = place_at(view, place, 1 + max(newest_number(view), *taken))
    assert found is not None, "nothing is in an attempt behind all others"
    return found


def place_at(view: RunView | None, place: Place, attempt: int) -> Place | None:
    """Return *place*, or one like it in *attempt*; None where others have saved that attempt or a later one."""
    if place.attempt == attempt:
        return place
    if attempt <= newest_number(view):
        return None
    if view is None or not view.of_attempt(place.attempt):
        return replace(place, attempt=attempt)
    assert place.after is not None, "an attempt that continues has a save before this one"
    fork = Fork(attempt=place.attempt, step=place.after)
    return replace(place, attempt=attempt, lineage=(fork, *place.lineage))


def place_beside(repo: Repository, rival: RecordRow) -> tuple[Place, PolicyUse]:
    """Return the place of *rival*, for a commit that may turn out to be the same, and the policy it was saved under."""
    record = repo.catalog.commit(rival.name).record
    place = Place(
        attempt=record.attempt,
        lineage=record.lineage,
        save_number=record.save_number,
        inherited={entry.layer: entry for entry in record.layers if not entry.saved_by(record)},
        supersedes=record.supersedes,
    )
    return place, record.policy


def place_of(
    repo: Repository,
    view: RunView | None,
    *,
    step: int,
    rivals: list[RecordRow],
    rollback: bool,
    resumed_from: str | None,
) -> Place:
    """
    Return where a new commit at *step* goes: into the newest attempt, or into one that it opens.

    Raises:
        InvalidInput: It says that training went back, and it did not.
    """
    if resumed_from is not None:
        return _resumed(repo, view, step=step, ref=resumed_from)
    if view is None or not view.rows:
        return Place(attempt=1, lineage=(), save_number=0, inherited={})
    attempt = newest_attempt(view)
    newest = next(saves_below(view, attempt=attempt, step=step), None)
    before = None if newest is None else repo.catalog.commit(newest.name).record
    if rollback:
        tip = max((row.step for row in view.of_attempt(attempt)), default=step)
        if step > tip:
            raise InvalidInput(
                f"--rollback: step {step} is after {view.run}@{tip}, the newest: training did not go back",
                hint="leave --rollback out",
            )
        return place_begun(view) if before is None else _fork(view, before, left=attempt)
    return Place(
        attempt=attempt,
        lineage=view.lineage_of(attempt),
        save_number=0 if before is None else before.save_number + 1,
        inherited={} if before is None else _by_layer(before),
        supersedes=tuple(sorted(row.id for row in rivals)),
    )


def newest_attempt(view: RunView) -> int:
    """Return the newest attempt that has commits, or had any where all are dropped."""
    return view.attempts[-1] if view.attempts else newest_number(view)


def newest_number(view: RunView | None) -> int:
    """Return the highest number that any attempt of *view* has."""
    return 0 if view is None else max((row.attempt for row in view.rows.values()), default=0)


def _resumed(repo: Repository, view: RunView | None, *, step: int, ref: str) -> Place:
    """Open an attempt that inherits what training was resumed from: a composite's own layers, not its base's."""
    record = resolve(repo, ref).record
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


def _fork(view: RunView | None, record: CommitRecord, *, left: int | None = None) -> Place:
    """Open the attempt that continues from *record*, or the first one of another run than its own."""
    if view is None or record.run != view.run:
        return Place(attempt=1 + newest_number(view), lineage=(), save_number=0, inherited=_by_layer(record))
    attempt = record.attempt if left is None else left
    lineage = record.lineage if attempt == record.attempt else view.lineage_of(attempt)
    return Place(
        attempt=1 + newest_number(view),
        lineage=(Fork(attempt=attempt, step=record.step), *lineage),
        save_number=record.save_number + 1,
        inherited=_by_layer(record),
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
    """Return the number of each inherited layer's save, as far as they are of *run* and before *place*."""
    origins = {layer: entry.origin for layer, entry in place.inherited.items() if entry.origin.run == run}
    return {layer: of.save_number for layer, of in origins.items() if of.save_number < place.save_number}


def rows_at(view: RunView | None, step: int) -> list[RecordRow]:
    """Return the visible commits of *step* in the newest attempt's history, or else in others, newest first."""
    if view is None:
        return []
    rows = [row for row in view.visible if row.step == step]
    return sorted(rows, key=lambda row: row.attempt, reverse=True)
