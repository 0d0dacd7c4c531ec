"""
Drop and undrop: move a commit's record to the trash, and back.

Nothing is freed until a collection empties the trash, by age. Commits that inherited layers keep their versions.
"""

import errno as errnos
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayerstoreError, NotFound, Overtaken, StorageIO
from layerstore.gc.mark import bytes_of_only, notes_on_exact
from layerstore.history import Needs, Resolved, begins_id, reference_to, references_to, resolve, view_read_again
from layerstore.layers import parse_reference, typed
from layerstore.model import Commit, CommitId
from layerstore.publish import republish, retire
from layerstore.storage import RecordName, Repository, RunView
from layerstore.units import short_id, utc


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A commit that was dropped, or would be."""

    _JSON: ClassVar = "run step attempt commit bytes=size_bytes inherited_by pins tip is_tip notes"

    run: str
    step: int
    attempt: int
    reference: str
    """Its reference while it was visible."""
    commit: str
    size_bytes: int
    """Bytes that a collection frees once the commit has left the trash."""
    inherited_by: tuple[str, ...]
    """Visible commits of the run that inherited layers from it, by step."""
    pins: tuple[str, ...]
    """Pins that keep what it needs."""
    tip: str | None
    """The run's tip without it; None if no commit is left."""
    is_tip: bool
    """Whether it was the run's tip."""
    notes: tuple[str, ...]
    """What a user has to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedCommit:
    """A commit in the trash."""

    _JSON: ClassVar = (
        "run=commit.run attempt=commit.record.attempt step=commit.step commit=commit.id time=commit.observed.time_ns "
        "dropped=dropped_ns"
    )

    commit: Commit
    dropped_ns: int
    """When it was dropped, by the filesystem's clock."""

    @property
    def dropped_at(self) -> datetime:
        """When it was dropped, in UTC."""
        return utc(self.dropped_ns)


def plan_drop(repo: Repository, ref: str) -> Dropped:
    """
    Return what dropping the commit *ref* would do; nothing is written.

    Raises:
        NotFound: There is no such commit.
        InvalidInput: *ref* is a pin.
    """
    resolved = resolve(repo, ref)
    record = resolved.record
    if resolved.pin is not None:
        raise InvalidInput(
            f"{resolved.pin!r} is a pin, and drop takes commits; nothing was changed",
            hint=f"layerstore pin --delete {typed(resolved.pin)}; layerstore log {typed(record.run)} lists the commits",
        )
    view = repo.catalog.view(record.run)
    attempts = {row.attempt for row in view.visible if row.id != resolved.commit}
    tip = next((row for row in view.history(max(attempts)) if row.id != resolved.commit), None) if attempts else None
    return Dropped(
        run=record.run,
        step=record.step,
        attempt=record.attempt,
        reference=reference_to(repo, record),
        commit=resolved.commit,
        size_bytes=bytes_of_only(repo, record, commit=resolved.commit),
        inherited_by=_inheritors(repo, view, resolved),
        pins=tuple(pin.name for pin in repo.records.readable_pins() if pin.base == resolved.commit),
        tip=None if tip is None else f"{view.run}@{tip.step}",
        is_tip=bool(view.attempts) and next(view.history(view.attempts[-1])).id == resolved.commit,
        notes=notes_on_exact(repo, view, {resolved.commit}),
    )


def execute_drop(repo: Repository, ref: str) -> Dropped:
    """
    Move the commit *ref* to the trash, durably; raises as `plan_drop` does.
    """
    repo.prepare_saving()
    with repo.lock_run(resolve(repo, ref).record.run):
        # Under the lock: *ref* may mean another commit by now.
        plan = plan_drop(repo, ref)
        name = RecordName(plan.run, plan.step, CommitId(plan.commit))
        retire(repo, repo.catalog.commit(name))  # else the commit that it replaced would reappear
        repo.trash.take_record(name)
        repo.catalog.forget([name])
    return plan


def damaged_records(repo: Repository, ref: str) -> list[RecordName]:
    """
    Return the damaged records at the step of *ref*; none if *ref* names no step of a run.

    One that only cannot be read just now, or by this version, is not damaged.
    """
    reference = parse_reference(ref)
    if reference.step is None or not repo.records.names(reference.name):
        return []
    view = view_read_again(repo, reference.name, reference.step)
    damaged = {} if view is None else view.damaged
    return sorted(name for name, problem in damaged.items() if name.step == reference.step and _is_damage(problem))


def _is_damage(problem: LayerstoreError) -> bool:
    return isinstance(problem, IntegrityError) or (isinstance(problem, StorageIO) and problem.errno == errnos.EIO)


def give_up(repo: Repository, ref: str) -> list[RecordName]:
    """Move the damaged records at the step of *ref* to the trash; a collection will remove what only they need."""
    if not damaged_records(repo, ref):
        return []
    repo.prepare_saving()
    with repo.lock_run(parse_reference(ref).name):
        names = damaged_records(repo, ref)  # an ingest may have written one again
        for name in names:
            repo.trash.take_damaged(repo.layout.record(name.run, name.step, name.id))
        repo.catalog.forget(names)
    return names


def dropped(repo: Repository, run: str | None = None) -> list[DroppedCommit]:
    """Return the readable commits in the trash, newest first within each run."""
    commits = []
    for name in repo.trash.records():
        if run is None or name.run == run:
            try:
                commit = repo.trash.read_record(name)
            except (NotFound, IntegrityError):
                continue  # emptied meanwhile, or damaged and lost
            commits.append(DroppedCommit(commit=commit, dropped_ns=repo.trash.modified_ns(name)))
    return sorted(
        commits, key=lambda dropped_commit: (dropped_commit.commit.record.run, -dropped_commit.commit.record.step)
    )


def find_dropped(repo: Repository, ref: str) -> Commit:
    """
    Return the commit in the trash that *ref* means: ``RUN@STEP``, or the beginning of its id.

    Raises:
        NotFound: There is none.
        Conflict: There are several of that step.
    """
    reference = parse_reference(ref)
    commits = [
        trashed.commit
        for trashed in dropped(repo)
        if (begins_id(ref) and trashed.commit.id.startswith(ref))
        or (trashed.commit.record.run, trashed.commit.record.step) == (reference.name, reference.step)
    ]
    if not commits:
        raise NotFound(f"{ref} is not in the trash", hint="layerstore log --dropped lists what is")
    if len(commits) > 1:
        ids = ", ".join(short_id(commit.id) for commit in commits)
        raise Conflict(f"{len(commits)} commits of {ref} are in the trash: {ids}", hint="name one by its id")
    return commits[0]


def undrop(repo: Repository, ref: str) -> Commit:
    """
    Make the commit *ref* visible again.

    Raises:
        NotFound: It is not in the trash.
        Conflict: Another commit has taken its step, or another attempt its number.
        Overtaken: An object that it needs is gone; it stays in the trash.
    """
    repo.prepare_saving()
    commit = find_dropped(repo, ref)
    record = commit.record
    with repo.lock_run(record.run):
        view = repo.catalog.find(record.run)
        own = [] if view is None else view.of_attempt(record.attempt)
        rival = next((row for row in own if row.step == record.step), None)
        if rival is not None and rival.id == commit.id:
            raise NotFound(f"{ref} is not dropped: it was saved again", hint="layerstore log lists it")
        if rival is not None:
            raise Conflict(
                f"{record.run}@{record.step} is commit {short_id(rival.id)} by now; nothing was changed",
                hint=f"layerstore drop {short_id(rival.id)} makes room for it",
            )
        # It would come back hidden.
        hides = next((row for row in ([] if view is None else view.rows.values()) if commit.id in row.supersedes), None)
        if hides is not None:
            raise Conflict(
                f"{ref} was replaced by commit {short_id(hides.id)}, {record.run}@{hides.step}; nothing was changed",
                hint=f"layerstore drop {short_id(hides.id)} makes room for it",
            )
        if record.run in repo.records.pin_names():
            raise Conflict(
                f"{record.run!r} is the name of a pin by now; runs and pins share their names; nothing was changed",
                hint=f"layerstore pin --delete {typed(record.run)} frees the name",
            )
        if any(row.lineage != record.lineage for row in own):
            raise Conflict(
                f"attempt {record.attempt} of {record.run!r} has another history by now; nothing was changed",
                hint=f"layerstore compose {short_id(commit.id)} -o DIR composes it from the trash",
            )
        try:
            with repo.trash.restoring(commit):
                repo.objects.look_anew()
                for needed in Needs(repo).add_record(record):
                    repo.objects.check_there(needed)  # a repair, or somebody's rm, may have taken what a blob names
                republish(repo, commit)
        except (IntegrityError, Overtaken) as exc:
            raise Overtaken(f"{ref} cannot come back: {exc}", hint="ingest its checkpoint again") from exc
    return commit


def _inheritors(repo: Repository, view: RunView, resolved: Resolved) -> tuple[str, ...]:
    """Return references to the visible commits that inherited layers from *resolved*."""
    source = resolved.record
    inheritors = []
    for row in view.visible:
        if row.id == resolved.commit or row.step < source.step:
            continue
        try:
            entries = repo.catalog.commit(row.name).record.layers
        except (NotFound, IntegrityError):
            continue  # just collected, or damaged, which verify reports
        if any(entry.saved_by(source) for entry in entries):
            inheritors.append(row)
    return tuple(references_to(repo, inheritors))
