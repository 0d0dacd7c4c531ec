"""Retention: which commits of a run a collection keeps, and why."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar

from layerstore.errors import IntegrityError
from layerstore.format import WITHOUT_MOMENTS
from layerstore.gc.mark import commit_named, named, pin_names, readable_pins
from layerstore.gc.trim import has_moments
from layerstore.history import measured_by
from layerstore.model import Commit, CommitId
from layerstore.policy import Candidate, Keep
from layerstore.storage import RecordName, RecordRow, Repository, RunView, row_of
from layerstore.units import utc

NOT_REQUESTED = "not asked about"
NOT_PUSHED = "not pushed yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFate:
    """What becomes of one visible commit."""

    _JSON: ClassVar = "run step attempt commit reference time=time_ns"

    run: str
    attempt: int
    step: int
    commit: str
    reference: str = ""
    time_ns: int = 0
    """When it was saved: the later of its record's time and its file's."""
    kept_by: tuple[str, ...]
    """The rules that keep it; none if it goes."""
    goes_because: str
    """Why it goes; empty if it is kept."""
    loses_moments: bool
    """Whether it stays without its optimizer's moments."""
    is_blind: bool
    """Whether it is kept because the only rule is about a metric that no commit of its run has."""
    bytes_freed: int = 0
    """The bytes that its removal frees; bytes that several removed commits share count for the first one listed."""
    bytes_freed_later: int = 0
    """Likewise, the bytes of objects that are still too young to go."""

    @property
    def time(self) -> datetime | None:
        """When it was saved, in UTC; None if that cannot be read."""
        return utc(self.time_ns) if self.time_ns else None

    @property
    def goes(self) -> bool:
        """Whether its record is to be removed."""
        return not self.kept_by

    @property
    def name(self) -> RecordName:
        """The name of its record."""
        return RecordName(self.run, self.step, CommitId(self.commit))


@dataclass(slots=True, kw_only=True)
class _Fact:
    """What the rules need to know about a record."""

    time_ns: int
    metrics: dict[str, float]
    """The metric that a rule is about, if it was measured."""
    waits_for_log: bool
    """Whether the metric may still come with the log of the attempt's next commit: there was no next commit yet."""
    has_moments: bool | None = None
    """None until a rule needs to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownPin:
    """The row of a pin, and the identity of the pin's file when it was read."""

    identity: tuple[int, ...] | None
    row: RecordRow
    """The row that the pin's record would have in the index."""


Pins = Mapping[CommitId, Sequence[tuple[str, RecordRow]]]
"""All pins, by the commit that they were made from: each pin's name, and the row of its record."""


class Facts:
    """
    What the rules of *keep* need to know about records and pins, remembered so that few files are read again.

    Each collection uses new Facts, so that it decides by the files as they are now. A saver, which asks after each
    commit whether a collection would have work, always uses one Facts object.
    """

    def __init__(self, repo: Repository, keep: Keep) -> None:
        self.repo = repo
        self.keep = keep
        self._known: dict[CommitId, _Fact] = {}
        self._pins: dict[str, _KnownPin] = {}

    def of(self, row: RecordRow, view: RunView) -> _Fact:
        """
        Return the facts of *row*, a commit of *view*, from its record.

        Raises:
            IntegrityError: The record cannot be read, or the index contradicts it.
        """
        fact = self._known.get(row.id)
        is_tip = view.of_attempt(row.attempt)[-1].id == row.id
        if fact is None or (fact.waits_for_log and not is_tip):
            fact = self._known[row.id] = self._read(row, view, is_tip=is_tip)
        return fact

    def _read(self, row: RecordRow, view: RunView, *, is_tip: bool) -> _Fact:
        best = self.keep.best_of
        with commit_named(row):
            commit = self.repo.catalog.commit(row.name)
            logged = {} if best is None else measured_by(self.repo, commit.record, view=view).at_save
            metrics = {name: value for name, value in logged.items() if best and name == best.metric}
            fact = _Fact(
                time_ns=_saved_ns(self.repo, commit),
                metrics=metrics,
                waits_for_log=is_tip and best is not None and not metrics,
            )
        if row_of(commit) != row:  # the record is sound, so the hint must not advise dropping it
            raise IntegrityError(f"the index contradicts the record of {row.run}@{row.step}", hint="layerstore reindex")
        return fact

    def candidate(self, row: RecordRow, view: RunView, *, is_in_history: bool) -> Candidate:
        """Return *row* as the rules see it; rules that only count steps do not need its record."""
        if self.keep.age is None and self.keep.best is None:
            return Candidate(id=row.id, step=row.step, time_ns=0, is_in_history=is_in_history)
        fact = self.of(row, view)
        return Candidate(
            id=row.id, step=row.step, time_ns=fact.time_ns, is_in_history=is_in_history, metrics=fact.metrics
        )

    def has_moments(self, row: RecordRow, view: RunView) -> bool:
        """Whether the commit *row* of *view* has moments."""
        fact = self.of(row, view)
        if fact.has_moments is None:
            with commit_named(row):
                fact.has_moments = has_moments(self.repo, self.repo.catalog.commit(row.name).record)
        return fact.has_moments

    def pins(self) -> Pins:
        """Return the pins as they are now; pins whose files are unchanged are not read again."""
        files, layout = self.repo.files, self.repo.layout
        # Identities before contents: a pin that is replaced in between is read again next time.
        states = {name: files.identity(layout.pin(name)) for name in pin_names(self.repo)}
        self._pins = {name: known for name, known in self._pins.items() if states.get(name) == known.identity}
        for pin in readable_pins(self.repo, [name for name in states if name not in self._pins]):
            with named(f"pin {pin.name!r}"):
                row = row_of(Commit(id=pin.base, record=pin.record, observed=pin.observed))
            self._pins[pin.name] = _KnownPin(identity=states[pin.name], row=row)
        pins: dict[CommitId, list[tuple[str, RecordRow]]] = {}
        for name, known in self._pins.items():
            pins.setdefault(known.row.id, []).append((name, known.row))
        return pins

    def forget_all_but(self, view: RunView) -> None:
        """Forget commits that are not in *view*."""
        for name in self._known.keys() - view.rows.keys():
            del self._known[name]


def _saved_ns(repo: Repository, commit: Commit) -> int:
    """
    Return when *commit* was saved: the later of its record's time and its file's.

    The record's time comes from a node's clock, which may be wrong; the file's time from the filesystem's clock, which
    rules also use for the present. For a trimmed commit, the record's time alone counts, since the trim wrote the file.
    """
    record = commit.record
    if WITHOUT_MOMENTS in record.flags:
        return commit.observed.time_ns
    path = repo.layout.record(record.run, record.step, commit.id)
    return max(commit.observed.time_ns, repo.files.modified_ns(path) or 0)


def choose(
    facts: Facts,
    view: RunView,
    keep: Keep | None,
    *,
    pins: Pins,
    now_ns: int,
    elsewhere: Container[object] | None = None,
) -> tuple[CommitFate, ...]:
    """
    Return the fate of each visible commit of *view*, newest first; without *keep*, all stay.

    With *elsewhere*, commits that are not in it stay as they are.

    Raises:
        IntegrityError: A record cannot be read.
    """
    fates = tuple(_fates(facts, view, keep, pins, now_ns))
    return fates if elsewhere is None else tuple(_spared(fate, elsewhere) for fate in fates)


def _spared(fate: CommitFate, elsewhere: Container[object]) -> CommitFate:
    if not (fate.goes or fate.loses_moments) or fate.commit in elsewhere:
        return fate
    return replace(fate, kept_by=fate.kept_by or (NOT_PUSHED,), goes_because="", loses_moments=False)


def _fates(facts: Facts, view: RunView, keep: Keep | None, pins: Pins, now_ns: int) -> Iterable[CommitFate]:
    goes_on = list(view.history(view.newest_attempt))
    history = {row.id for row in goes_on}
    rows = [*goes_on, *(row for row in reversed(view.visible) if row.id not in history)]
    best = None if keep is None else keep.best_of
    reasons = {}
    if keep is not None:
        candidates = [facts.candidate(row, view, is_in_history=row.id in history) for row in rows]
        reasons = keep.reasons(candidates, now_ns=now_ns)
    aged = _aged(rows, keep)
    ahead, busy = _ahead(view, goes_on), _being_saved(facts.repo, view)
    # Rules are per run: if a run never logged the metric, none of its commits is worse than the best, so all stay.
    is_blind = best is not None and all(best.reason not in kept_by_rules for kept_by_rules in reasons.values())
    blind = f"no commit has {best.metric}" if best and is_blind and keep and keep.is_best_alone else None
    for row in rows:
        kept_by = (NOT_REQUESTED,) if keep is None else reasons[row.id]
        if not kept_by and row.id in ahead:
            kept_by = ("beyond the newest attempt",)
        if not kept_by and row.id in busy:
            kept_by = ("a job is saving its attempt",)
        if not kept_by and blind is not None:
            kept_by = (blind,)
        pin = _pin_of(row, pins)
        # A running job's next save inherits whole versions, with moments, from the job's last commit.
        is_aged = bool(kept_by) and row.id in aged and not (pin or row.id in busy or blind in kept_by)
        loses_moments = is_aged and facts.has_moments(row, view)
        if pin is not None:
            kept_by = (*kept_by, f"pin {pin}")
        abandoned = "" if row.id in history else ", and training has left its attempt"
        yield CommitFate(
            run=row.run,
            attempt=row.attempt,
            step=row.step,
            commit=row.id,
            kept_by=kept_by,
            goes_because="" if kept_by else f"no rule keeps it{abandoned}",
            loses_moments=loses_moments,
            is_blind=blind in kept_by,
        )


def _pin_of(row: RecordRow, pins: Pins) -> str | None:
    """Return a pin with exactly the layers of *row*, or None; a pinned composite on this base has other layers."""
    for name, pinned in pins.get(row.id, ()):
        if (pinned.layer_names, pinned.versions) == (row.layer_names, row.versions):
            return name
    return None


def _ahead(view: RunView, goes_on: list[RecordRow]) -> set[CommitId]:
    """
    Return the tips of attempts that got further than the newest attempt.

    If a job forgot to resume, the newest attempt starts at zero: until it has caught up, the other tips are kept.
    """
    if not goes_on:
        return set()
    tips = (view.of_attempt(attempt)[-1] for attempt in view.attempts)
    return {tip.id for tip in tips if tip.step > goes_on[0].step}


def _being_saved(repo: Repository, view: RunView) -> set[CommitId]:
    """Return the tips of attempts that jobs are saving now: the jobs' next saves inherit from these."""
    return {view.of_attempt(attempt)[-1].id for attempt in repo.attempts_being_saved(view.run, view.attempts)}


def _aged(rows: list[RecordRow], keep: Keep | None) -> set[CommitId]:
    """Return the commits old enough to lose their moments; *rows* begin with the run's tip."""
    if keep is None or keep.drop_optimizer_older_than is None or not rows:
        return set()
    return {row.id for row in rows if row.step < rows[0].step - keep.drop_optimizer_older_than}


def views_of(repo: Repository) -> list[RunView]:
    """
    Return the view of every run.

    Raises:
        IntegrityError: A record is damaged: what it needs, or hides, is unknown.
    """
    views = [view for view in (repo.catalog.find(run) for run in repo.catalog.runs()) if view is not None]
    for view in views:
        for name, problem in view.damaged.items():
            with commit_named(name):
                raise problem
    return views
