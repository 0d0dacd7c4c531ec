"""Retention: which commits of a run a collection keeps, and why."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from layerstore.compose import content_of
from layerstore.gc.mark import named
from layerstore.gc.trim import has_moments, saved_ns
from layerstore.history import newest_attempt, saved_now
from layerstore.layers import typed
from layerstore.model import CommitId, CommitRecord
from layerstore.policy import Candidate, Keep
from layerstore.storage import RecordRow, Repository, RunView
from layerstore.zero3 import TRAINER_STATE

NOT_ASKED = "not asked about"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a visible commit."""

    row: RecordRow
    kept_by: tuple[str, ...]
    """The rules that keep it; none where it goes."""
    goes_because: str
    """Why it goes; empty where it is kept."""
    time_ns: int = 0
    """When it was saved, by the younger of its record's time and its file's."""
    loses_moments: bool = False
    """Whether the commit stays and one without moments takes its record's place."""
    is_blind: bool = False
    """Whether it is kept because the one rule there is says nothing of its run."""

    @property
    def goes(self) -> bool:
        """Whether the record is to be removed."""
        return not self.kept_by


def choose(
    repo: Repository, view: RunView, keep: Keep | None, *, pinned: Mapping[CommitId, str], now_ns: int
) -> tuple[Fate, ...]:
    """
    Return what *keep* makes of each visible commit of *view*, newest first; without it all stay.

    Raises:
        IntegrityError: A record cannot be read.
    """
    return tuple(_fates(repo, view, keep, pinned, now_ns))


def _fates(
    repo: Repository, view: RunView, keep: Keep | None, pinned: Mapping[CommitId, str], now_ns: int
) -> Iterable[Fate]:
    goes_on = list(view.history(newest_attempt(view)))
    history = {row.id for row in goes_on}
    rows = [*goes_on, *(row for row in reversed(view.visible) if row.id not in history)]
    best = None if keep is None else keep.best_of
    candidates = [
        _candidate(repo, row, is_in_history=row.id in history, needs_metrics=best is not None) for row in rows
    ]
    times = {each.id: each.time_ns for each in candidates}
    aged = _aged(rows, keep)
    reasons = {} if keep is None else keep.reasons(candidates, now_ns=now_ns)
    ahead, busy = _ahead(view, goes_on), _being_saved(repo, view)
    # Rules are per run: who has measured something else has no best commit, and so no other ones.
    is_blind = best is not None and all(best.reason not in each for each in reasons.values())
    blind = f"no commit has {best.metric}" if best and is_blind and keep and keep.is_best_alone else None
    for row in rows:
        kept_by = (NOT_ASKED,) if keep is None else reasons[row.id]
        if not kept_by and row.id in ahead:
            kept_by = ("further than the newest attempt",)
        if not kept_by and row.id in busy:
            kept_by = ("a job is saving its attempt",)
        if not kept_by and blind is not None:
            kept_by = (blind,)
        # What a job saves next inherits whole versions from its last commit.
        is_aged = bool(kept_by) and row.id in aged and not (row.id in pinned or row.id in busy or blind in kept_by)
        with named(f"{row.run}@{row.step}", gives_up=f"layerstore drop {typed(f'{row.run}@{row.step}')}"):
            loses_moments = is_aged and has_moments(repo, repo.catalog.commit(row.name).record)
        if row.id in pinned:
            kept_by = (*kept_by, f"pin {pinned[row.id]}")
        abandoned = "" if row.id in history else ", and training has left its attempt"
        yield Fate(
            row=row,
            kept_by=kept_by,
            goes_because="" if kept_by else f"no rule keeps it{abandoned}",
            time_ns=times[row.id],
            loses_moments=loses_moments,
            is_blind=blind in kept_by,
        )


def _ahead(view: RunView, goes_on: list[RecordRow]) -> set[CommitId]:
    """
    Return the tips of attempts that came further than the newest one has by now.

    Who forgot to resume begins an attempt that is nobody's successor: until it has caught up, what it left is not old.
    """
    if not goes_on:
        return set()
    tips = (view.of_attempt(attempt)[-1] for attempt in view.attempts)
    return {tip.id for tip in tips if tip.step > goes_on[0].step}


def _being_saved(repo: Repository, view: RunView) -> set[CommitId]:
    """Return the tips of attempts that jobs are saving now: what these save next rests on them."""
    return {view.of_attempt(attempt)[-1].id for attempt in saved_now(repo, view.run, view.attempts)}


def _candidate(repo: Repository, row: RecordRow, *, is_in_history: bool, needs_metrics: bool) -> Candidate:
    called = f"{row.run}@{row.step}"
    with named(called, gives_up=f"layerstore drop {typed(called)}"):
        commit = repo.catalog.commit(row.name)
        return Candidate(
            id=row.id,
            step=row.step,
            time_ns=saved_ns(repo, commit),
            is_in_history=is_in_history,
            metrics=_metrics(repo, commit.record) if needs_metrics else {},
        )


def _aged(rows: list[RecordRow], keep: Keep | None) -> set[CommitId]:
    """Return the commits whose moments are to go; *rows* begin with the newest of the history that goes on."""
    if keep is None or keep.drop_optimizer_older_than is None or not rows:
        return set()
    return {row.id for row in rows if row.step < rows[0].step - keep.drop_optimizer_older_than}


def _metrics(repo: Repository, record: CommitRecord) -> dict[str, float]:
    """Return what ``trainer_state.json`` says was measured at the step of *record*."""
    if not record.states:
        return {}
    for file in repo.state(record.states[0]).files:
        if file.path == TRAINER_STATE:
            return _logged_at(content_of(repo, file.content), record.step)
    return {}


def _logged_at(data: bytes, step: int) -> dict[str, float]:
    try:
        entries = json.loads(data, parse_int=float)["log_history"]
        return {
            name: value
            for entry in entries
            if isinstance(entry, dict) and entry.get("step") == step
            for name, value in entry.items()
            if isinstance(value, float)
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}  # not the Trainer's own: then it names no metric


def views_of(repo: Repository) -> list[RunView]:
    """
    Return what every run holds.

    Raises:
        IntegrityError: A record is damaged: nobody knows what it needs, or what it hides.
    """
    found = [view for view in (repo.catalog.find(run) for run in repo.catalog.runs()) if view is not None]
    for view in found:
        for name, problem in view.damaged.items():
            with named(f"{name.run}@{name.step}", gives_up=f"layerstore drop {typed(f'{name.run}@{name.step}')}"):
                raise problem
    return found
