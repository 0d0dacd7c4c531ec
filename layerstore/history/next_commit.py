"""
The position of a new commit in its run (attempt, save number, inherited layers), and which job saves an attempt.

The caller holds the run's lock, or the attempt's (`reserve`). Locks are a courtesy: if two jobs that do not see each
other's locks save one attempt, nothing is lost, but a step that both saved is ambiguous.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from layerstore.errors import InvalidInput, Locked, StorageIO
from layerstore.history.references import resolve
from layerstore.history.save_history import saves_below
from layerstore.model import BlobRef, CommitId, CommitRecord, Fork, LayerEntry, Origin, PolicyUse, SourceLayout
from layerstore.precision import flagged, stated
from layerstore.storage import RecordRow, Repository, RunView
from layerstore.zero3 import LayerSource


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommit:
    """The position of a commit in its run."""

    attempt: int
    lineage: tuple[Fork, ...]
    save_number: int
    inherited: Mapping[str, LayerEntry]
    """Every layer's previous version; empty for the first save."""
    supersedes: tuple[CommitId, ...] = ()
    after: int | None = None
    """The step of this run that a resumed or rolled-back attempt continues from, if any; the commit must be later."""

    @property
    def fork(self) -> Fork | None:
        """Where its attempt forked from an earlier one."""
        return self.lineage[0] if self.lineage else None

    @classmethod
    def of(cls, record: CommitRecord) -> Self:
        """Return the position of *record*; saving equal content at this position again gives the same commit."""
        return cls(
            attempt=record.attempt,
            lineage=record.lineage,
            save_number=record.save_number,
            inherited={entry.layer: entry for entry in record.layers if not entry.saved_by(record)},
            supersedes=record.supersedes,
        )

    @classmethod
    def begun(cls, view: RunView | None) -> Self:
        """Return the position of training that starts from scratch, in a new attempt."""
        return cls(attempt=1 + _newest_number(view), lineage=(), save_number=0, inherited={})

    @classmethod
    def resumed(
        cls, view: RunView | None, record: CommitRecord, *, of_commit: str, is_as_it_stands: bool
    ) -> "NextCommit":
        """
        Return the position of a run resumed from *record*: the commit *of_commit*, or a composite based on it.

        If *record* is the unchanged tip of the newest attempt, that attempt continues; otherwise a new one forks.
        """
        newest = None if view is None else next(view.history(view.newest_attempt), None)
        if view is None or newest is None or newest.id != of_commit or not is_as_it_stands:
            return _fork(view, record)
        return cls(
            attempt=view.newest_attempt,
            lineage=view.lineage_of(view.newest_attempt),
            save_number=record.save_number + 1,
            inherited=_by_layer(record),
            after=record.step,
        )

    @classmethod
    def at_step(
        cls,
        repo: Repository,
        view: RunView | None,
        step: int,
        *,
        rivals: list[RecordRow],
        rollback: bool,
        resumed_from: str | None,
    ) -> "NextCommit":
        """
        Return the position of a new commit at *step*: in the newest attempt, replacing *rivals*, or in a new attempt.

        Raises:
            InvalidInput: *rollback* or *resumed_from* contradicts the run's history.
        """
        if resumed_from is not None:
            return _resumed(repo, view, step=step, ref=resumed_from)
        if view is None or not view.rows:
            return cls(attempt=1, lineage=(), save_number=0, inherited={})
        attempt = view.newest_attempt
        newest = next(saves_below(view, attempt=attempt, step=step), None)
        before = None if newest is None else repo.catalog.commit(newest.name).record
        if rollback:
            tip = max((row.step for row in view.of_attempt(attempt)), default=step)
            if step > tip:
                raise InvalidInput(
                    f"--rollback: step {step} is after {view.run}@{tip}, the newest: training did not go back",
                    hint="leave --rollback out",
                )
            # If training went back to before the first save, it started from scratch.
            return cls.begun(view) if before is None else _fork(view, before, left=attempt)
        return cls(
            attempt=attempt,
            lineage=view.lineage_of(attempt),
            save_number=0 if before is None else before.save_number + 1,
            inherited={} if before is None else _by_layer(before),
            supersedes=tuple(sorted(row.id for row in rivals)),
        )

    def moved_to(self, view: RunView | None, attempt: int) -> "NextCommit | None":
        """Return this position moved to *attempt*, or as it is if already there; None if *attempt* is not a new one."""
        if self.attempt == attempt:
            return self
        if attempt <= _newest_number(view):
            return None
        if view is None or not view.of_attempt(self.attempt):
            return replace(self, attempt=attempt)
        assert self.after is not None, "an attempt that continues has a save before this one"
        fork = Fork(attempt=self.attempt, step=self.after)
        return replace(self, attempt=attempt, lineage=(fork, *self.lineage))

    def avoiding(self, view: RunView | None, taken: Collection[int]) -> "NextCommit":
        """Return this position, moved to the next free attempt if other jobs have *taken* its attempt."""
        if self.attempt not in taken:
            return self
        moved = self.moved_to(view, 1 + max(_newest_number(view), *taken))
        assert moved is not None, "the attempt is newer than all others"
        return moved

    def record(
        self,
        *,
        run: str,
        step: int,
        layers: Iterable[LayerSource],
        due: Collection[str],
        versions: Mapping[str, BlobRef],
        states: tuple[BlobRef, ...],
        world_size: int,
        stage: int,
        layout: SourceLayout,
        policy: PolicyUse,
        precision: str = "exact",
        compact: Mapping[str, int] = MappingProxyType({}),
        flags: tuple[str, ...] = (),
    ) -> CommitRecord:
        """
        Return the record of a commit at this position, with *versions* of the layers *due*; all others are inherited.

        *compact* gives, for each layer saved compactly, the number of compact saves in a row, including this one.
        """
        origin = Origin(run=run, attempt=self.attempt, step=step, save_number=self.save_number)
        entries = tuple(
            LayerEntry(
                layer=layer.layer,
                version=versions[layer.layer],
                origin=origin,
                optimizer_step=layer.optimizer_step,
                compact=compact.get(layer.layer, 0),
            )
            if layer.layer in due
            else self.inherited[layer.layer]
            for layer in layers
        )
        return CommitRecord(
            run=run,
            attempt=self.attempt,
            lineage=self.lineage,
            step=step,
            save_number=self.save_number,
            world_size=world_size,
            stage=stage,
            layers=entries,
            states=states,
            layout=layout,
            policy=policy,
            supersedes=self.supersedes,
            precision=stated(precision, entries),
            flags=flagged(flags, entries),
        )

    def own_numbers(self, run: str) -> dict[str, int]:
        """Return the save number of each inherited layer that an earlier save of *run* saved."""
        origins = {layer: entry.origin for layer, entry in self.inherited.items() if entry.origin.run == run}
        return {layer: origin.save_number for layer, origin in origins.items() if origin.save_number < self.save_number}


def _newest_number(view: RunView | None) -> int:
    return 0 if view is None else view.newest_number


def _resumed(repo: Repository, view: RunView | None, *, step: int, ref: str) -> NextCommit:
    """Return the position in a new attempt that inherits from *ref*, the commit or composite that was resumed."""
    record = resolve(repo, ref).record
    is_of_run = view is not None and record.run == view.run
    if view is not None and view.attempts and not is_of_run:
        raise InvalidInput(
            f"--resumed-from {ref} belongs to run {record.run!r}, but {view.run!r} has commits already",
            hint="only a new run can begin from another run's commit",
        )
    if is_of_run and step <= record.step:
        raise InvalidInput(
            f"--resumed-from {ref} is step {record.step}, but the checkpoint is from step {step}: not after it",
            hint="name the commit or composite that training resumed from",
        )
    return _fork(view, record)


def _fork(view: RunView | None, record: CommitRecord, *, left: int | None = None) -> NextCommit:
    """Return the position in a new attempt that continues from *record*, which may belong to another run."""
    if view is None or record.run != view.run:
        # A fork refers to an attempt of its own run; from another run, only the layers are inherited.
        return NextCommit(attempt=1 + _newest_number(view), lineage=(), save_number=0, inherited=_by_layer(record))
    # After a rollback, the fork is from the newest attempt, even if the previous save belongs to an earlier attempt.
    attempt = record.attempt if left is None else left
    lineage = record.lineage if attempt == record.attempt else view.lineage_of(attempt)
    return NextCommit(
        attempt=1 + _newest_number(view),
        lineage=(Fork(attempt=attempt, step=record.step), *lineage),
        save_number=record.save_number + 1,
        inherited=_by_layer(record),
        after=record.step,
    )


def _by_layer(record: CommitRecord) -> dict[str, LayerEntry]:
    return {entry.layer: entry for entry in record.layers}


# -- who saves an attempt ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """An attempt that no other job saves, as far as locks can tell."""

    place: NextCommit
    lock: ExitStack
    """Holds the attempt's lock."""
    passed: tuple[Locked, ...]
    """Why earlier candidates were skipped: other jobs hold them."""
    doubt: StorageIO | None
    """Why the attempt could not be locked, so that another job may save it too; None if it is locked."""


def reserve(repo: Repository, run: str, placed: Callable[[Collection[int]], NextCommit], *, held: int = 0) -> Reserved:
    """Pick a position by *placed*, given the attempts that other jobs hold; lock its attempt, if not *held* yet."""
    taken: dict[int, Locked] = {}
    while True:
        place, lock, doubt = placed(taken.keys()), ExitStack(), None
        if place.attempt != held:
            try:
                lock.enter_context(repo.lock_attempt(run, place.attempt))
            except Locked as exc:
                taken[place.attempt] = exc
                continue
            except StorageIO as exc:
                doubt = exc  # locks do not work on this filesystem; since they are a courtesy, go on without
        return Reserved(place=place, lock=lock, passed=tuple(taken.values()), doubt=doubt)
