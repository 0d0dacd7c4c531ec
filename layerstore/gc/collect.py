"""
Collect: remove the commits that retention does not keep, then the objects that nothing needs.

`plan_gc` only decides; `execute_gc` carries a plan out while others use the store. Records are removed first; objects
are moved aside, then checked again, so that writers and readers need not wait (docs/internals/durability.md).
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from layerstore.errors import FULL_DISK_ERRNOS, Conflict, IntegrityError, InvalidInput, NotFound, StorageIO
from layerstore.gc.mark import Marks, concluding, named, notes_on_exact
from layerstore.gc.retention import CommitFate, Facts, choose, views_of
from layerstore.gc.sweep import Gone, settle, take_aside
from layerstore.gc.trim import add_needs, plan_trim, trim
from layerstore.history import Needs, metrics_if_sound, references_to
from layerstore.limits import GC_GRACE_SECONDS, GC_UNFINISHED_GRACE_SECONDS, TRASH_SECONDS
from layerstore.nearest import did_you_mean, nearest
from layerstore.policy import Keep
from layerstore.progress import Progress, Silent
from layerstore.publish import retire
from layerstore.storage import RecordName, Repository, RunView
from layerstore.units import size


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOutcome:
    """What a collection removed, or would remove."""

    _JSON: ClassVar = "pins orphans young unfinished trash waiting notes"

    commits: tuple[CommitFate, ...]
    """Every visible commit, run by run, newest first."""
    objects: Gone
    orphans: Gone
    """Those of *objects* that no removed commit refers to: left by killed writers, or kept by the trash until now."""
    young: Gone
    """Unneeded objects that are too young to go: a writer may be about to refer to them."""
    unfinished: Gone
    """Temporary files of killed writers, and parts of saves that nobody will complete."""
    trash: Gone
    """Dropped records and damaged files that leave the trash for good."""
    pins: tuple[str, ...]
    """The names of all pins; whatever a pin needs is kept."""
    dropped: tuple[str, ...] = ()
    """The dropped and replaced commits that leave the trash for good, as RUN@STEP."""
    waiting: Gone = field(default_factory=Gone)
    """Objects that stay aside until the next collection, because other nodes may still see stale listings."""
    notes: tuple[str, ...] = ()
    """What the user should know."""

    def __repr__(self) -> str:
        commits = f"commits {len(self.removed)} removed and {len(self.commits) - len(self.removed)} kept"
        return f"<GcOutcome {commits}, objects {self.objects.count} removed, {size(self.bytes_freed)} freed>"

    @property
    def removed(self) -> list[CommitFate]:
        """The commits that go."""
        return [fate for fate in self.commits if not fate.kept_by]

    @property
    def trimmed(self) -> list[CommitFate]:
        """The commits that lose their moments."""
        return [fate for fate in self.commits if fate.loses_moments]

    @property
    def bytes_freed(self) -> int:
        """The bytes freed in all."""
        return self.objects.size_bytes + self.unfinished.size_bytes - self.waiting.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GcRequest:
    """What a collection is asked to do."""

    keep: Keep
    runs: Iterable[str] | None = None
    """The runs that *keep* applies to, None for all; every other run keeps all of its commits."""
    grace_seconds: float | None = None
    """The minimum age of objects that go; None for the default."""
    trash_seconds: float | None = None
    """How long dropped commits stay in the trash; None for the default."""
    elsewhere: Container[object] | None = None
    """The commits that may go, because a remote has them; None if all may."""
    confirmed: GcOutcome | None = None
    """The plan that a user has confirmed, if any."""

    def __post_init__(self) -> None:
        if not isinstance(self.confirmed, GcOutcome | None):
            raise InvalidInput(f"confirmed cannot be {self.confirmed!r}", hint="pass what gc(dry_run=True) returned")
        if self.grace_seconds is not None and not 0 <= self.grace_seconds < math.inf:
            raise InvalidInput(f"grace_seconds cannot be {self.grace_seconds}", hint="pass seconds, like 3600, or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What will be removed, and the facts behind the decision."""

    outcome: GcOutcome
    runs: tuple[tuple[RunView, tuple[CommitFate, ...]], ...]
    marks: Marks

    @property
    def fates(self) -> list[CommitFate]:
        """The fates of all visible commits."""
        return [fate for _, fates in self.runs for fate in fates]


def has_work(facts: Facts, run: str) -> bool:
    """
    Whether the rules of *facts* would remove anything of *run*, or have to report that no commit has their metric.

    Savers call this after each commit: unlike a collection, it reads only records that *facts* does not know yet.
    """
    repo = facts.repo
    view = repo.catalog.find(run)
    if view is None:
        return False
    facts.forget_all_but(view)
    fates = choose(facts, view, facts.keep, pins=facts.pins(), now_ns=repo.aside.now_ns())
    return any(fate.goes or fate.loses_moments or fate.is_blind for fate in fates)


# -- the plan ------------------------------------------------------------------------------------------------------


@concluding("nothing was removed")
def plan_gc(repo: Repository, request: GcRequest, *, progress: Progress) -> GcPlan:
    """
    Decide what to remove; writes nothing, but touches a folder to read the filesystem's clock.

    Raises:
        IntegrityError: A record, pin, part or blob cannot be read, so what it needs is unknown; or commits would go
            while a commit that stays lacks an object.
    """
    # Taken first, so that whatever is written while we look counts as younger.
    now_ns = repo.aside.now_ns()
    # A short grace period must not end saves that take hours; 0 may, as the user thereby promises that nobody writes.
    unfinished_seconds = request.grace_seconds and max(request.grace_seconds, GC_UNFINISHED_GRACE_SECONDS)
    facts = Facts(repo, request.keep)
    runs = chosen(facts, request, now_ns)
    fates = [fate for _, run_fates in runs for fate in run_fates]
    going = {fate.name for fate in fates if fate.goes or fate.loses_moments}
    repo.objects.look_anew()
    marks = Marks(
        repo,
        old_before_ns=now_ns - _ns(request.grace_seconds, GC_GRACE_SECONDS),
        dead_before_ns=now_ns - _ns(unfinished_seconds, GC_UNFINISHED_GRACE_SECONDS),
        trash_before_ns=now_ns - _ns(request.trash_seconds, TRASH_SECONDS),
    )
    progress.start("records", sum(len(view.rows) for view, _ in runs) - len(going))
    for fate in fates:
        if fate.loses_moments:
            with named(f"{fate.run}@{fate.step}"):
                planned = plan_trim(repo, repo.catalog.commit(fate.name))
            marks.check_present(add_needs(marks.needs, planned), holder=fate)
    # If no commit goes, no possible replacement for a lost object goes either, so lost objects may be ignored.
    marks.look(progress, without=going, has_to_be_whole=bool(going))
    old, young = _tally(repo, fates, marks)
    leftovers = repo.aside.leftovers(before_ns=marks.dead_before_ns)
    old_records, old_files = _old_trash(repo, marks.trash_before_ns)
    outcome = GcOutcome(
        commits=_commit_fates(repo, fates, old, young),
        objects=_sum(old),
        orphans=old[None],
        young=_sum(young),
        unfinished=Gone(len(leftovers), sum(size_bytes for _, size_bytes in leftovers)),
        trash=Gone(len(old_records) + len(old_files), sum(map(repo.trash.size_of_damaged, old_files))),
        pins=tuple(repo.records.pin_names()),
        dropped=tuple(f"{name.run}@{name.step}" for name in old_records if not repo.records.is_there(name)),
        notes=notes_of(repo, runs),
    )
    return GcPlan(outcome=outcome, runs=runs, marks=marks)


def notes_of(repo: Repository, runs: Iterable[tuple[RunView, Sequence[CommitFate]]]) -> tuple[str, ...]:
    """Return what the user should know about the commits of *runs* that go."""
    return tuple(
        note
        for view, fates in runs
        for note in notes_on_exact(repo, view, {fate.commit for fate in fates if fate.goes})
    )


def _ns(given_seconds: float | None, ours_seconds: float) -> int:
    return int((ours_seconds if given_seconds is None else given_seconds) * 1e9)


def _old_trash(repo: Repository, before_ns: int) -> tuple[list[RecordName], list[Path]]:
    records = [name for name in repo.trash.records() if repo.trash.modified_ns(name) < before_ns]
    files = [path for path in repo.trash.damaged() if (repo.files.modified_ns(path) or before_ns) < before_ns]
    return records, files


_ByCommit = dict[int | None, Gone]
"""Sums of unneeded objects, by the number of the removed commit that refers to them; None if no such commit does."""


def _tally(repo: Repository, fates: Sequence[CommitFate], marks: Marks) -> tuple[_ByCommit, _ByCommit]:
    """Sum up unneeded objects, old and young. Each object is charged to the first commit that refers to it."""
    needs_of_gone = Needs(repo, besides=marks.needs)
    for number, fate in enumerate(fates):
        if fate.goes or fate.loses_moments:
            # The commit goes anyway; what cannot be attributed to it because of damage counts as orphans.
            with contextlib.suppress(IntegrityError, NotFound):
                needs_of_gone.add_record(repo.catalog.commit(fate.name).record, number=number)
    old, young = (defaultdict[int | None, Gone](Gone) for _ in range(2))
    for unneeded in marks.unneeded():
        (young if unneeded.is_young else old)[needs_of_gone.number(unneeded.ref.id)] += Gone(1, unneeded.ref.size_bytes)
    for unneeded in marks.aside(repo.aside.ids()):
        if not unneeded.is_young:
            old[needs_of_gone.number(unneeded.ref.id)] += Gone(1, unneeded.ref.size_bytes)
    return old, young


def _sum(parts: Mapping[int | None, Gone]) -> Gone:
    return sum(parts.values(), Gone())


def chosen(facts: Facts, request: GcRequest, now_ns: int) -> tuple[tuple[RunView, tuple[CommitFate, ...]], ...]:
    """
    Return the fate of every visible commit, run by run, newest first; reads all their records.

    Raises:
        NotFound: There is no such run.
        IntegrityError: A record is damaged, or the index contradicts it.
    """
    repo = facts.repo
    views = views_of(repo)
    requested_runs = {view.run for view in views} if request.runs is None else set(request.runs)
    for run in sorted(requested_runs - {view.run for view in views}):
        repo.catalog.view(run)  # raises, and lists the existing runs
    pins = facts.pins()
    runs = []
    for view in views:
        keep = request.keep if view.run in requested_runs else None
        fates = choose(facts, view, keep, pins=pins, now_ns=now_ns, elsewhere=request.elsewhere)
        # Removal must rest on the record, not on the index.
        times = {fate.commit: facts.of(view.rows[fate.name.id], view).time_ns for fate in fates}
        runs.append((view, tuple(replace(fate, time_ns=times[fate.commit]) for fate in fates)))
    requested = [(view, fates) for view, fates in runs if view.run in requested_runs]
    _check_metric(repo, request.keep, requested)
    return tuple(runs)


def _check_metric(repo: Repository, keep: Keep, runs: Sequence[tuple[RunView, Sequence[CommitFate]]]) -> None:
    best = keep.best_of
    reasons = {reason for _, fates in runs for fate in fates for reason in fate.kept_by}
    if best is None or best.reason in reasons or not any(fates for _, fates in runs):
        return
    newest = [repo.catalog.commit(row.name).record for view, _ in runs if (row := view.newest) is not None]
    known = {name: None for record in newest for name in metrics_if_sound(repo, record) or ()}
    if best.metric in known:
        raise InvalidInput(f"no commit has a finite {best.metric!r}; nothing was changed", hint="choose another metric")
    known_metrics = (
        f"the newest commits have {', '.join(known)}" if known else "the newest commits have no metrics at all"
    )
    raise InvalidInput(
        f"no commit has the metric {best.metric!r}; nothing was changed",
        hint=did_you_mean(nearest(best.metric, known), else_=known_metrics),
    )


def _commit_fates(
    repo: Repository, fates: Sequence[CommitFate], old: _ByCommit, young: _ByCommit
) -> tuple[CommitFate, ...]:
    """Return *fates*, each with its commit's reference and the bytes that the commit's removal frees."""
    references = references_to(repo, fates)
    return tuple(
        replace(
            fate,
            reference=reference,
            bytes_freed=old[number].size_bytes,
            bytes_freed_later=young[number].size_bytes,
        )
        for number, (fate, reference) in enumerate(zip(fates, references, strict=True))
    )


# -- execution -----------------------------------------------------------------------------------------------------


def execute_gc(repo: Repository, request: GcRequest, *, progress: Progress) -> GcOutcome:
    """
    Remove what `plan_gc` finds; raises what `plan_gc` raises.

    Safe to kill at any moment: what is needed stays readable, and the next collection settles what lies aside.

    Raises:
        Locked: Another collection is running.
        Conflict: More would go than was confirmed, and nothing was removed; or a migration is unfinished.
    """
    repo.prepare_writing()
    with repo.lock_gc() as hold:
        _check_no_migration(repo)
        # Plan again under the lock: a plan that the user has seen is only compared with this one.
        plan = plan_gc(repo, request, progress=progress)
        check_confirmed(plan.fates, plan.outcome.trash, request)
        # Nothing is gone yet: if the lock was lost, stop here.
        hold.check()
        _remove_idle_parts(repo, plan)
        _remove_records(repo, plan)
        _check_no_migration(repo)
        # Before anything moves, mark the saves that were published since the plan.
        _look_again(plan)
        repo.aside.make_folder()
        progress.start("remove", plan.outcome.objects.size_bytes)
        freed = Gone()
        while True:
            full = take_aside(repo, plan.marks, progress)
            listed = repo.aside.ids()  # objects that another collection moves aside later are left to it
            _look_again(plan)
            hold.check()  # if another collection took the lock, it settles what lies aside
            gone, waiting = settle(repo, plan.marks, listed)
            freed += gone
            # If the disk was full, the objects just unlinked have made room to move the next ones aside.
            if full is None:
                break
            if not gone.count:
                # Nothing could be unlinked either, so another round would find no more room.
                raise full
        _tidy(repo, plan)
        # `objects` includes those that wait; `bytes_freed` subtracts them.
        return replace(plan.outcome, objects=freed + waiting, waiting=waiting)


_NEW_PLAN = "look at the new plan: repeat the command"


def check_confirmed(fates: Iterable[CommitFate], trash: Gone, request: GcRequest) -> None:
    """Raise Conflict if more is to go than was confirmed."""
    if request.confirmed is None:
        return
    removed = {fate.commit for fate in request.confirmed.removed}
    trimmed = {fate.commit for fate in request.confirmed.trimmed} | removed
    for fate in fates:
        if (fate.goes and fate.commit not in removed) or (fate.loses_moments and fate.commit not in trimmed):
            raise Conflict(
                f"the plan that was shown keeps {fate.run}@{fate.step}, but now it would go; nothing was removed",
                hint=_NEW_PLAN,
            )
    if trash.count > request.confirmed.trash.count:
        raise Conflict(
            "more would be deleted from the trash now than the plan showed; nothing was removed", hint=_NEW_PLAN
        )


def _check_no_migration(repo: Repository) -> None:
    """
    Make sure that no migration has read the records that this collection removes: the migration would restore them.

    A migration makes its folder, then reads; a collection removes records, then looks for the folder, before any
    object goes. So one of the two sees the other, even if a lock was lost.
    """
    repo.records.check_store()
    if repo.files.exists(repo.layout.migrating):
        raise Conflict(
            "a migration of this store was begun and is not finished; no object was removed",
            hint="layerstore migrate finishes it, or begins it afresh",
        )


def _remove_idle_parts(repo: Repository, plan: GcPlan) -> None:
    """Remove idle sessions' parts before the next look, so that a rank that still wants to join them notices."""
    for session in plan.marks.dead_sessions:
        repo.parts.remove_session(session, before_ns=plan.marks.dead_before_ns)


def _remove_records(repo: Repository, plan: GcPlan) -> None:
    """Remove the records that go, and old trash; first retire what a record hides, or it would reappear later."""
    for view, fates in plan.runs:
        if view.hidden:
            for row in view.visible:
                retire(repo, repo.catalog.commit(row.name))
        for fate in fates:
            if fate.loses_moments:
                with _hinting_at_room():
                    trim(repo, fate.name)
        going = [fate.name for fate in fates if fate.goes]
        repo.records.remove(going)
        # After the records: if killed in between, the next query drops rows without a record anyway.
        repo.catalog.forget(going)
    records, files = _old_trash(repo, plan.marks.trash_before_ns)
    for name in records:
        repo.trash.remove_record(name)
    for path in files:
        repo.trash.remove_damaged(path)


@contextlib.contextmanager
def _hinting_at_room() -> Iterator[None]:
    """Hint at how to make room if the disk is too full to write the replacement of a trimmed commit."""
    try:
        yield
    except StorageIO as exc:
        if exc.errno in FULL_DISK_ERRNOS:
            exc.hint = "first run gc without --drop-optimizer-older-than: it writes nothing, and makes room"
        raise


def _look_again(plan: GcPlan) -> None:
    with concluding("objects due for removal stay aside until a gc succeeds"):  # records are gone already
        plan.marks.look(Silent())


def _tidy(repo: Repository, plan: GcPlan) -> None:
    for path, _ in repo.aside.leftovers(before_ns=plan.marks.dead_before_ns):
        # Not synced: the next collection removes what a power cut brings back.
        repo.files.unlink(path)
