"""
Drop and undrop: move a commit's record to the trash, and back.

Nothing is freed until the record is old enough for a collection to remove it from the trash. Commits that inherited
layers from the dropped commit keep them.
"""

import contextlib
import errno as errnos
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayerstoreError, NotFound, Overtaken, StorageIO
from layerstore.gc.mark import bytes_of_only, commit_named, concluding, notes_on_exact
from layerstore.history import Needs, begins_id, references_to, resolve, view_read_again
from layerstore.layers import is_name, parse_reference, typed
from layerstore.model import Commit, CommitId, Saving
from layerstore.publish import republish, retire
from layerstore.storage import RecordName, RecordRow, Repository, RunView, name_in
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
    """Bytes freed when it leaves the trash for good; bytes that several dropped commits share count for the first."""
    inherited_by: tuple[str, ...]
    """The run's remaining commits that inherited layers from this commit, in step order."""
    pins: tuple[str, ...]
    """Pins of this commit, which keep what it needs."""
    tip: str | None
    """The run's tip after the drop; None if no commit is left."""
    is_tip: bool
    """Whether it was the run's tip."""
    notes: tuple[str, ...]
    """What the user should know."""


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


def plan_drop(repo: Repository, refs: Iterable[str], *, runs: Iterable[str] = ()) -> tuple[Dropped, ...]:
    """Return what dropping the commits *refs* and all commits of *runs* together would do; nothing is written."""
    commits = [_read(repo, name) for name in _named(repo, refs, runs)]
    going = {commit.id for commit in commits}
    views = {run: repo.catalog.view(run) for run in dict.fromkeys(commit.run for commit in commits)}
    tips = {run: _tip(view, going) for run, view in views.items()}
    notes = {
        run: (*notes_on_exact(repo, view, going), *(_notes_on_job(repo, view) if tips[run] is None else ()))
        for run, view in views.items()
    }
    inheritors = _inheritors(views.values(), commits)
    pins = list(repo.records.readable_pins())
    references = references_to(repo, [commit.record for commit in commits])
    sizes_bytes = bytes_of_only(repo, commits)
    return tuple(
        Dropped(
            run=commit.run,
            step=commit.step,
            attempt=commit.record.attempt,
            reference=reference,
            commit=commit.id,
            size_bytes=size_bytes,
            inherited_by=tuple(references_to(repo, inheritors[commit.id])),
            pins=tuple(pin.name for pin in pins if pin.base == commit.id),
            tip=tips[commit.run],
            is_tip=_is_tip(views[commit.run], commit.id),
            notes=notes[commit.run],
        )
        for commit, reference, size_bytes in zip(commits, references, sizes_bytes, strict=True)
    )


def execute_drop(repo: Repository, refs: Iterable[str], *, runs: Iterable[str] = ()) -> tuple[Dropped, ...]:
    """
    Move the commits *refs*, and all commits of *runs*, to the trash, durably.

    If `plan_drop` raises, nothing was moved. If the disk fails at a commit, the commits before it were moved.
    """
    repo.prepare_saving()
    refs, runs = list(refs), list(runs)
    with contextlib.ExitStack() as locks:
        # In the order of their names, so that two drops of the same runs cannot deadlock.
        for run in sorted({name.run for name in _named(repo, refs, runs)}):
            locks.enter_context(repo.lock_run(run))
        # Plan under the locks: a reference may resolve to a different commit now.
        plan = plan_drop(repo, refs, runs=runs)
        for dropped_commit in plan:
            name = RecordName(dropped_commit.run, dropped_commit.step, CommitId(dropped_commit.commit))
            retire(repo, repo.catalog.commit(name))  # otherwise the commit that it replaced would reappear
            repo.trash.take_record(name)
            repo.catalog.forget([name])
    return plan


def _named(repo: Repository, refs: Iterable[str], runs: Iterable[str]) -> list[RecordName]:
    """Return the names of the commits *refs* and of all commits of *runs*, each once, including unreadable ones."""
    names = [_commit_named(repo, ref) for ref in refs]
    for run in runs:
        view = repo.catalog.view(run)
        names += [*view.damaged, *(row.name for row in view.visible)]
    return list(dict.fromkeys(names))


def _read(repo: Repository, name: RecordName) -> Commit:
    with concluding("nothing was changed"), commit_named(name):
        return repo.catalog.commit(name)


def _commit_named(repo: Repository, ref: str) -> RecordName:
    resolved = resolve(repo, ref)
    record = resolved.record
    if resolved.pin is not None:
        raise InvalidInput(
            f"{resolved.pin!r} is a pin, and drop takes commits; nothing was changed",
            hint=f"layerstore pin --delete {typed(resolved.pin)}; layerstore log {typed(record.run)} lists the commits",
        )
    view = repo.catalog.find(record.run)
    if view is None or resolved.commit not in view.rows:  # `resolve` also finds trashed commits by id
        raise NotFound(f"{ref} is in the trash already; nothing was changed", hint="layerstore log --dropped lists it")
    return RecordName(record.run, record.step, resolved.commit)


def _tip(view: RunView, going: Set[str]) -> str | None:
    """Return a reference to the run's tip without the commits *going*; None if no commit is left."""
    attempts = {row.attempt for row in view.visible if row.id not in going}
    tip = next((row for row in view.history(max(attempts)) if row.id not in going), None) if attempts else None
    return None if tip is None else f"{view.run}@{tip.step}"


def _notes_on_job(repo: Repository, view: RunView) -> Iterator[str]:
    """Yield a note if a job still saves the run *view*: its next save would bring the dropped run back."""
    if repo.attempts_being_saved(view.run, view.attempts):
        yield f"a job seems to be saving {view.run} now: its next save restores the run; end the job, or drop again"


def _is_tip(view: RunView, commit: str) -> bool:
    return bool(view.attempts) and next(view.history(view.attempts[-1])).id == commit


def damaged_records(repo: Repository, ref: str) -> list[RecordName]:
    """
    Return the damaged records at the step of *ref*; none if *ref* is not a step of a run.

    A record that temporarily cannot be read, or that needs another version of layerstore, is not damaged; nor is a
    renamed record, which is sound under its old name.
    """
    reference = parse_reference(ref)
    if reference.step is None or not repo.records.names(reference.name):
        return []
    view = view_read_again(repo, reference.name, reference.step)
    damaged = {} if view is None else view.damaged
    return sorted(
        name for name, problem in damaged.items() if name.step == reference.step and _is_damage(repo, problem)
    )


def _is_damage(repo: Repository, problem: LayerstoreError) -> bool:
    if isinstance(problem, StorageIO):
        return problem.errno == errnos.EIO
    return isinstance(problem, IntegrityError) and not _is_moved(repo, problem)


def _is_moved(repo: Repository, problem: IntegrityError) -> bool:
    """Whether the record was merely renamed, and no record has its old name, either in the run or in the trash."""
    folder, _, place = str(problem.facts.get("written_as", "")).partition("/")
    run, _, file_name = place.partition("/")
    own = name_in(run, file_name) if folder == "commits" and is_name(run) else None
    return own is not None and not repo.records.is_listed(own) and own not in repo.trash.records()


def give_up(repo: Repository, ref: str) -> list[RecordName]:
    """Move the damaged records at the step of *ref* to the trash; a collection will remove what only they need."""
    if not damaged_records(repo, ref):
        return []
    repo.prepare_saving()
    with repo.lock_run(parse_reference(ref).name):
        names = damaged_records(repo, ref)  # again, under the lock: an ingest may have rewritten a record
        for name in names:
            repo.trash.take_damaged(repo.layout.record(name.run, name.step, name.id))
        repo.catalog.forget(names)
    return names


def dropped(repo: Repository, run: str | None = None) -> list[DroppedCommit]:
    """Return the readable commits in the trash that are not visible again, newest first within each run."""
    commits = _readable(repo, (name for name in repo.trash.only_here() if run is None or name.run == run))
    return sorted(
        commits, key=lambda dropped_commit: (dropped_commit.commit.record.run, -dropped_commit.commit.record.step)
    )


def _readable(repo: Repository, names: Iterable[RecordName]) -> Iterator[DroppedCommit]:
    for name in names:
        with contextlib.suppress(IntegrityError):  # damaged: it cannot come back
            yield from _commits_in_trash(repo, [name])


def _commits_in_trash(repo: Repository, names: Iterable[RecordName]) -> Iterator[DroppedCommit]:
    for name in names:
        with contextlib.suppress(NotFound):  # removed in the meantime
            commit = repo.trash.read_record(name)
            yield DroppedCommit(commit=commit, dropped_ns=repo.trash.modified_ns(name))


def undrop(repo: Repository, refs: Iterable[str], *, runs: Iterable[str] = ()) -> list[Commit]:
    """
    Make the commits *refs*, and all commits of *runs* in the trash, visible again.

    If one commit is refused, none comes back; if the disk fails at a commit, the ones before it are back, and the call
    can be repeated.
    """
    repo.prepare_saving()
    named = _in_trash(repo, refs, runs)
    with contextlib.ExitStack() as locks:
        for run in sorted({commit.run for commit in named.values()}):
            locks.enter_context(repo.lock_run(run))
        _check_places(repo, named)
        _restore(repo, named)
    return list(named.values())


def _in_trash(repo: Repository, refs: Iterable[str], runs: Iterable[str]) -> dict[str, Commit]:
    """Return the commits in the trash that *refs* and *runs* refer to, each once, by the name that messages show."""
    names = repo.trash.records()
    commits = {ref: _commit_meant(repo, names, ref) for ref in refs}
    for run in runs:
        of_run = _newest_of_run(repo, [name for name in names if name.run == run], run, commits.values())
        commits |= {f"{run}@{commit.step} (commit {short_id(commit.id)})": commit for commit in of_run}
    once = {commit.id: name for name, commit in commits.items()}
    return {name: commits[name] for name in once.values()}


def _commit_meant(repo: Repository, names: Iterable[RecordName], ref: str) -> Commit:
    """
    Return the commit in the trash that *ref* refers to: ``RUN@STEP``, ``RUN~1@STEP`` or the beginning of its id.

    Raises:
        NotFound: No such commit is in the trash.
        Conflict: Several commits of that step are in the trash.
    """
    reference = parse_reference(ref)
    meant = [
        name
        for name in names
        if (begins_id(ref) and name.id.startswith(ref)) or (name.run, name.step) == (reference.name, reference.step)
    ]
    of_step = [entry.commit for entry in _readable(repo, meant)]
    commits = of_step
    ids = ", ".join(f"{short_id(commit.id)} of attempt {commit.record.attempt}" for commit in of_step)
    if reference.back:
        # As in every reference, only attempts that have commits count: ~1 is the last but one of these.
        view = repo.catalog.find(reference.name)
        attempts = [] if view is None else view.attempts[: -reference.back]
        commits = [commit for commit in of_step if [commit.record.attempt] == attempts[-1:]]
    if not commits:
        hint = "layerstore log --dropped lists what is"
        if of_step:
            hint = f"name it by its id: {ids}; ~ counts only attempts that have commits"
        elif reference.step is None and any(name.run == reference.name for name in names):
            hint = f"layerstore undrop --run {typed(reference.name)} brings that run back"
        raise NotFound(f"{ref} is not in the trash", hint=hint)
    if len(commits) > 1:
        raise Conflict(f"{len(commits)} commits of {ref} are in the trash: {ids}", hint="name one by its id")
    return commits[0]


def _newest_of_run(repo: Repository, names: Iterable[RecordName], run: str, others: Iterable[Commit]) -> list[Commit]:
    """
    Return the commits of *names*, all of *run*, that can come back together with *others*.

    Of several commits with the same attempt and step, only the one dropped last can come back. If an attempt's number
    was reused, only commits of the newest attempt with that number can come back.

    Raises:
        IntegrityError: A commit is damaged; skipping it might bring back an older commit of the same step.
    """
    by_time = sorted(_commits_in_trash(repo, names), key=lambda entry: entry.dropped_ns)
    if not by_time:
        raise NotFound(f"no commit of {run!r} is in the trash", hint="layerstore log --dropped lists what is")
    commits = {_place(entry.commit.record): entry.commit for entry in by_time}
    view = repo.catalog.find(run)
    visible = () if view is None else tuple(view.visible)
    taken = {_place(row): row.id for row in visible} | {_place(commit.record): commit.id for commit in others}
    lineages = {commit.record.attempt: commit.record.lineage for commit in (*commits.values(), *others)}
    lineages |= {row.attempt: row.lineage for row in visible}
    free = [
        commit
        for place, commit in commits.items()
        if taken.get(place, commit.id) == commit.id and lineages[commit.record.attempt] == commit.record.lineage
    ]
    # If none is free, return all: `_check_places` then refuses each for its own reason.
    return sorted(free or commits.values(), key=lambda commit: (commit.step, commit.record.attempt))


def _check_places(repo: Repository, named: Mapping[str, Commit]) -> None:
    """Raise Conflict unless all of the commits *named* can return together, each to its attempt and step."""
    views = [view for run in {commit.run for commit in named.values()} if (view := repo.catalog.find(run)) is not None]
    visible = {_place(row): row for view in views for row in view.visible}
    replaced = {old: row for view in views for row in view.rows.values() for old in row.supersedes}
    lineages = {(row.run, row.attempt): row.lineage for row in visible.values()}
    pins = repo.records.pin_names()
    by_place: dict[tuple[str, int, int], str] = {}
    for name, commit in named.items():
        record, place = commit.record, _place(commit.record)
        rival, hides = visible.get(place), replaced.get(commit.id)
        if rival is not None and rival.id == commit.id:
            continue  # a killed undrop has restored it, but left it in the trash
        if (other := by_place.setdefault(place, name)) != name:
            raise Conflict(
                f"{other} and {name} both belong at {commit.run}@{commit.step}; nothing was changed",
                hint="name one of the two",
            )
        if rival is not None:
            raise Conflict(
                f"{record.run}@{record.step} is commit {short_id(rival.id)} now; nothing was changed",
                hint=f"layerstore drop {short_id(rival.id)}, then layerstore undrop {short_id(commit.id)}",
            )
        if hides is not None:  # it would come back hidden
            raise Conflict(
                f"{name} was replaced by commit {short_id(hides.id)}, {record.run}@{hides.step}; nothing was changed",
                hint=f"layerstore drop {short_id(hides.id)}, then layerstore undrop {short_id(commit.id)}",
            )
        if record.run in pins:
            raise Conflict(
                f"{record.run!r} is the name of a pin now; runs and pins share one namespace; nothing was changed",
                hint=f"layerstore pin --delete {typed(record.run)} frees the name",
            )
        if lineages.setdefault((record.run, record.attempt), record.lineage) != record.lineage:
            raise Conflict(
                f"attempt {record.attempt} of {record.run!r} has a different history now; nothing was changed",
                hint=f"layerstore compose {short_id(commit.id)} -o DIR composes it from the trash",
            )


def _restore(repo: Repository, named: Mapping[str, Commit]) -> None:
    with contextlib.ExitStack() as restored:
        for commit in named.values():
            restored.enter_context(repo.trash.restoring(commit))
        repo.objects.look_anew()
        needs = Needs(repo)
        # Check all before restoring the first: a repair, or somebody's rm, may have removed a blob's objects.
        for name, commit in named.items():
            with _naming_what_is_gone(name):
                for needed in needs.add_record(commit.record):
                    repo.objects.check_there(needed)
        for name, commit in named.items():
            with _naming_what_is_gone(name):
                republish(repo, commit)


@contextlib.contextmanager
def _naming_what_is_gone(name: str) -> Iterator[None]:
    try:
        yield
    except (IntegrityError, Overtaken) as exc:
        raise Overtaken(f"{name} cannot come back: {exc}", hint="ingest its checkpoint again") from exc


def _inheritors(views: Iterable[RunView], going: Sequence[Commit]) -> dict[str, list[RecordRow]]:
    """Return, for each id of *going*, the visible commits that stay and inherit layers from that commit."""
    inheritors: dict[str, list[RecordRow]] = {commit.id: [] for commit in going}
    for view in views:
        sources = [commit for commit in going if commit.run == view.run]
        first = min(commit.step for commit in sources)
        for row in view.visible:
            if row.id in inheritors or row.step < first:
                continue
            origins = {_place(entry.origin) for entry in row.entries().values()}
            for commit in sources:
                if _place(commit.record) in origins:
                    inheritors[commit.id].append(row)
    return inheritors


def _place(save: Saving) -> tuple[str, int, int]:
    return save.run, save.attempt, save.step
