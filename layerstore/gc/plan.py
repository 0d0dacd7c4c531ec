"""
Gc: which commits nobody wants to keep, and what nothing needs any more once they are gone.

This is the plan, which writes nothing. It is marked from what is kept: from records, pins and the parts of saves under
way, never from the index. `collecting` carries it out.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from layerstore.errors import IntegrityError, InvalidInput, NotFound
from layerstore.limits import GC_GRACE_SECONDS, GC_UNFINISHED_GRACE_SECONDS
from layerstore.model import Collection
from layerstore.nearest import did_you_mean, nearest
from layerstore.gc.mark import Marks, concluding, named, pinned_commits
from layerstore.history.needs import Needs
from layerstore.progress import Progress
from layerstore.history.references import references_to
from layerstore.gc.retention import Fate, RunPlan, plan_run, views_of
from layerstore.storage.rooms import Rooms
from layerstore.gc.trim import add_needs, plan_trim
from layerstore.gc.unserved import Unserved, unserved
from layerstore.policy.keep import Keep
from layerstore.storage.runview import RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFate:
    """What becomes of one commit."""

    run: str
    attempt: int
    step: int
    commit: str
    reference: str
    time_ns: int
    """When it was saved; 0 of a hidden one."""
    kept_by: tuple[str, ...]
    """The rules that keep it; none where it goes."""
    goes_because: str
    is_visible: bool
    loses_moments: bool
    """Whether it is kept without its optimizer's moments from now on."""
    bytes_freed: int
    """What goes with it, and with none of those listed before."""
    bytes_freed_later: int
    """Likewise, what is too young to go yet."""


@dataclass(frozen=True, slots=True)
class Gone:
    """So many of something, and their bytes."""

    count: int = 0
    size_bytes: int = 0

    def __add__(self, other: "Gone") -> "Gone":
        """Return both together."""
        return Gone(self.count + other.count, self.size_bytes + other.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcOutcome:
    """What a collection removed, or would remove."""

    commits: tuple[CommitFate, ...]
    """Every commit, run by run, those first that are kept."""
    objects: Gone
    orphans: Gone
    """Those of the objects that no removed commit named: what killed writers left."""
    young: Gone
    """What nothing needs, and is too young to go: somebody may be about to name it."""
    unfinished: Gone
    """Files of writers that never ended, and parts of saves that nobody will complete."""
    unserved: tuple[Unserved, ...]
    """What kept steps can no longer be asked for."""
    pins: tuple[str, ...]
    """Pins, which keep all that they need."""
    waiting: Gone = field(default_factory=Gone)
    """What stays aside for the next collection, because other nodes may not see yet what is kept."""

    @property
    def removed(self) -> list[CommitFate]:
        """The commits that go."""
        return [fate for fate in self.commits if not fate.kept_by]

    @property
    def trimmed(self) -> list[CommitFate]:
        """The commits that lose their moments."""
        return [fate for fate in self.commits if fate.loses_moments]

    def as_confirmed(self) -> "Confirmed":
        """Return what somebody agrees to who has seen this plan."""
        return Confirmed({fate.commit for fate in self.removed}, {fate.commit for fate in self.trimmed})

    @property
    def bytes_freed(self) -> int:
        """All of it."""
        return self.objects.size_bytes + self.unfinished.size_bytes - self.waiting.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What is to go, and all that was needed to find out."""

    outcome: GcOutcome
    runs: tuple[tuple[RunView, RunPlan], ...]
    marks: Marks
    doomed: Gone
    """Objects at their places that are to go; `Marks.doomed` says which, when their turn comes."""
    unfinished: list[Collection]
    """Collections that were stopped before all their records were gone."""
    old_before_ns: int
    unfinished_before_ns: int

    @property
    def going(self) -> list[Fate]:
        """The records to be removed."""
        return [fate for _, run in self.runs for fate in run.fates if fate.goes]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The only visible commits that may go, and that may lose their moments."""

    removed: Set[str]
    trimmed: Set[str]

    def allows(self, fate: Fate) -> bool:
        """Whether what becomes of a commit is no more than was shown."""
        return fate.row.id in self.removed or (fate.loses_moments and fate.row.id in self.trimmed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of a collection."""

    keep: Keep
    runs: Iterable[str] | None = None
    """Those that *keep* speaks for, None for all; the others keep what they have."""
    grace_seconds: float | None = None
    """How old a thing is at least that goes; None for our own word."""
    confirmed: Confirmed | None = None
    """What somebody was asked about; None where nobody was."""


def has_work(rooms: Rooms, request: Request) -> bool:
    """Whether any record of the runs asked about is to go: only these are looked at, and nothing is marked."""
    now_ns = rooms.garbage.now_ns()
    pinned = pinned_commits(rooms)
    views = [rooms.catalog.find(run) for run in request.runs or rooms.catalog.runs()]
    return any(
        fate.goes or fate.is_blind
        for view in views
        if view is not None
        for fate in plan_run(rooms, view, request.keep, pinned=pinned, now_ns=now_ns).fates
    )


def plan_gc(rooms: Rooms, request: Request, *, progress: Progress) -> GcPlan:
    """
    Find out what is to go; nothing is written but a probe for the time.

    Raises:
        IntegrityError: A record, pin, part or blob cannot be read: what it needs is not known, so nothing may go.
            Or records would go, and what is to stay lacks an object.
    """
    with concluding("nothing was removed"):
        return _plan(rooms, request, progress)


def _plan(rooms: Rooms, request: Request, progress: Progress) -> GcPlan:
    now_ns = rooms.garbage.now_ns()
    given = request.grace_seconds
    old_before_ns = now_ns - int((GC_GRACE_SECONDS if given is None else given) * 1e9)
    unfinished_before_ns = now_ns - int((GC_UNFINISHED_GRACE_SECONDS if given is None else given) * 1e9)
    planned = _planned_runs(rooms, request, now_ns)
    _check_metric(request.keep, planned)
    going = {fate.row.name for _, plan in planned for fate in plan.fates if fate.goes}
    marks = Marks(rooms, old_before_ns=old_before_ns, dead_before_ns=unfinished_before_ns)
    progress.start("records", sum(len(view.rows) for view, _ in planned) - len(going))
    for _, plan in planned:
        for fate in plan.fates:
            if fate.loses_moments:
                with named(f"{fate.row.run}@{fate.row.step}"):
                    trim = plan_trim(rooms, rooms.catalog.commit(fate.row.name))
                marks.check_whole(add_needs(marks.needs, trim), of=fate.row)
    # What only sweeps takes nothing that could stand in for what is lost, so it may go on.
    marks.look(progress, without=going, has_to_be_whole=bool(going))
    listed = [fate for _, plan in planned for fate in plan.fates if fate.row.layer_names]
    tally = _tally(rooms, listed, marks)
    tmp_count, tmp_bytes = rooms.garbage.sweep_tmp(before_ns=unfinished_before_ns, dry_run=True)
    outcome = GcOutcome(
        commits=_commit_fates(rooms, listed, tally),
        objects=_sum(tally.old) + _sum(tally.aside),
        orphans=tally.old[None] + tally.aside[None],
        young=_sum(tally.young),
        unfinished=Gone(count=tmp_count, size_bytes=tmp_bytes),
        unserved=unserved(rooms, planned, needs=marks.needs),
        pins=tuple(rooms.records.pin_names()),
    )
    return GcPlan(
        outcome=outcome,
        runs=planned,
        marks=marks,
        doomed=_sum(tally.old),
        unfinished=rooms.garbage.unfinished(rooms.records.is_there),
        old_before_ns=old_before_ns,
        unfinished_before_ns=unfinished_before_ns,
    )


@dataclass(frozen=True, slots=True)
class _Tally:
    """What nothing needs any more, by the number of the commit that it goes with; None for what none had named."""

    old: dict[int | None, Gone]
    young: dict[int | None, Gone]
    aside: dict[int | None, Gone]
    """What earlier collections have moved aside."""


def _tally(rooms: Rooms, listed: Sequence[Fate], marks: Marks) -> _Tally:
    """Look at every object; one goes with the first of the commits *listed* that names it."""
    taken = Needs(rooms, besides=marks.needs)
    for number, fate in enumerate(listed):
        if fate.goes:
            # What one names that is damaged counts as orphans as far as it is not known: the commit goes anyway.
            with contextlib.suppress(IntegrityError, NotFound):
                taken.add_record(rooms.catalog.commit(fate.row.name).record, number=number)
    tally = _Tally(*(defaultdict[int | None, Gone](Gone) for _ in range(3)))
    for each in marks.unneeded():
        (tally.young if each.is_young else tally.old)[taken.number(each.ref.id)] += Gone(1, each.ref.size_bytes)
    for collection_id in rooms.garbage.asides():
        for each in marks.aside(collection_id):
            if not each.is_young:
                tally.aside[taken.number(each.ref.id)] += Gone(1, each.ref.size_bytes)
    return tally


def _sum(parts: Mapping[int | None, Gone]) -> Gone:
    return sum(parts.values(), Gone())


def _planned_runs(rooms: Rooms, request: Request, now_ns: int) -> tuple[tuple[RunView, RunPlan], ...]:
    views = views_of(rooms)
    wanted = {view.run for view in views} if request.runs is None else set(request.runs)
    missing = wanted - {view.run for view in views}
    if missing:
        run = min(missing)
        hint = did_you_mean(nearest(run, (view.run for view in views)), else_="layerstore log lists the runs")
        raise NotFound(f"there is no run {run!r} in this store", hint=hint)
    pinned = pinned_commits(rooms)
    return tuple(
        (view, plan_run(rooms, view, request.keep if view.run in wanted else None, pinned=pinned, now_ns=now_ns))
        for view in views
    )


def _check_metric(keep: Keep, planned: Iterable[tuple[RunView, RunPlan]]) -> None:
    best = keep.best_of
    reasons = {reason for _, plan in planned for fate in plan.fates for reason in fate.kept_by}
    if best is None or best.reason in reasons or not any(plan.fates for _, plan in planned):
        return
    raise InvalidInput(
        f"no commit has {best.metric!r} in its trainer_state.json; nothing was changed",
        hint="the metric has to be logged at the step of a save, under this very name",
    )


def _commit_fates(rooms: Rooms, listed: Sequence[Fate], tally: _Tally) -> tuple[CommitFate, ...]:
    """Return what becomes of every commit, with the bytes that go with it."""
    references = references_to(rooms, [fate.row for fate in listed])
    return tuple(
        _commit_fate(
            fate,
            reference,
            tally.old[number].size_bytes + tally.aside[number].size_bytes,
            tally.young[number].size_bytes,
        )
        for number, (fate, reference) in enumerate(zip(listed, references, strict=True))
    )


def _commit_fate(fate: Fate, reference: str, freed: int, later: int) -> CommitFate:
    row = fate.row
    return CommitFate(
        run=row.run,
        attempt=row.attempt,
        step=row.step,
        commit=row.id,
        reference=reference,
        time_ns=fate.time_ns,
        kept_by=fate.kept_by,
        goes_because=fate.goes_because,
        is_visible=fate.is_visible,
        loses_moments=fate.loses_moments,
        bytes_freed=freed,
        bytes_freed_later=later,
    )
