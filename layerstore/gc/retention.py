"""
Which records of a run a collection keeps, and in which order the others may go.

A record may go only after all that it hides: else that would show again. Of an attempt something always stays, if only
a record without layers: attempts are numbered, and later ones look through it at what it forked from.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from layerstore.model import Commit, CommitId, CommitRecord
from layerstore.publish.hiding import hiding_commit
from layerstore.ops.loading import content_of
from layerstore.gc.mark import named
from layerstore.history.place import newest_attempt
from layerstore.history.resumed import beginning, what_resumed
from layerstore.storage.rooms import Rooms
from layerstore.history.attempt_locks import saved_now
from layerstore.gc.trim import has_moments, saved_ns
from layerstore.policy.keep import Candidate, Keep
from layerstore.storage.manifest import RecordRow
from layerstore.storage.runview import RunView
from layerstore.zero3.discover import TRAINER_STATE

NOT_ASKED = "not asked about"
STAND_IN = "gc"
"""What the policy of a record is called that stands for what a collection has removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of a record."""

    row: RecordRow
    kept_by: tuple[str, ...]
    """The rules that keep it; none where it goes."""
    goes_because: str
    """Why it goes; empty where it is kept."""
    is_visible: bool
    time_ns: int = 0
    """When it was saved, by the younger of its record's time and its file's; of visible ones."""
    loses_moments: bool = False
    """Whether the commit stays and one without moments takes its record's place."""
    is_blind: bool = False
    """Whether it is kept because the one rule there is says nothing of its run."""

    @property
    def goes(self) -> bool:
        """Whether the record is to be removed."""
        return not self.kept_by or self.loses_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What becomes of a run."""

    fates: tuple[Fate, ...]
    """Of all its records, the visible ones first, newest first."""
    stand_ins: tuple[Commit, ...]
    """Records to be written, each for one that goes and must not be forgotten."""


def plan_run(rooms: Rooms, view: RunView, keep: Keep | None, *, pinned: Mapping[CommitId, str], now_ns: int) -> RunPlan:
    """
    Return what *keep* leaves of *view*; without, its visible commits all stay.

    Raises:
        IntegrityError: A record cannot be read.
    """
    fates = [*_visible_fates(rooms, view, keep, pinned, now_ns), *_other_fates(rooms, view)]
    stand_ins = []
    for attempt in sorted({fate.row.attempt for fate in fates}):
        own = [fate for fate in fates if fate.row.attempt == attempt]
        for fate in _remembered(rooms, own):
            if fate.kept_by:
                continue
            if fate.row.layer_names:
                stand_ins.append(_stand_in(rooms, fate.row))
            else:
                fates[fates.index(fate)] = replace(fate, kept_by=("it remembers",), goes_because="")
    return RunPlan(fates=tuple(fates), stand_ins=tuple(stand_ins))


def _remembered(rooms: Rooms, own: list[Fate]) -> list[Fate]:
    """
    Return what of an attempt must not be forgotten: its highest number, and what it was resumed from.

    Numbers are given once, and attempts too; and later saves rest on what the first one began with.
    """
    highest = max(own, key=lambda fate: (fate.row.save_number, fate.row.step, not fate.row.layer_names))
    began = beginning(rooms, [fate.row for fate in own])
    return [highest, *(fate for fate in own if fate.row is began and fate is not highest)]


def _visible_fates(
    rooms: Rooms, view: RunView, keep: Keep | None, pinned: Mapping[CommitId, str], now_ns: int
) -> Iterable[Fate]:
    goes_on = list(view.history(newest_attempt(view)))
    history = {row.id for row in goes_on}
    rows = [*goes_on, *(row for row in reversed(view.visible) if row.id not in history)]
    best = None if keep is None else keep.best_of
    candidates = [
        _candidate(rooms, row, is_in_history=row.id in history, needs_metrics=best is not None) for row in rows
    ]
    times = {each.id: each.time_ns for each in candidates}
    aged = _aged(rows, keep)
    reasons = {} if keep is None else keep.reasons(candidates, now_ns=now_ns)
    ahead, busy = _ahead(view, goes_on), _being_saved(rooms, view)
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
        with named(f"{row.run}@{row.step}"):
            loses_moments = is_aged and has_moments(rooms, rooms.catalog.commit(row.name).record)
        if row.id in pinned:
            kept_by = (*kept_by, f"pin {pinned[row.id]}")
        abandoned = "" if row.id in history else ", and training has left its attempt"
        yield Fate(
            row=row,
            kept_by=kept_by,
            goes_because="" if kept_by else f"no rule keeps it{abandoned}",
            is_visible=True,
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


def _being_saved(rooms: Rooms, view: RunView) -> set[CommitId]:
    """Return the tips of attempts that jobs are saving now: what these save next rests on them."""
    return {view.of_attempt(attempt)[-1].id for attempt in saved_now(rooms, view.run, view.attempts)}


def _candidate(rooms: Rooms, row: RecordRow, *, is_in_history: bool, needs_metrics: bool) -> Candidate:
    commit = rooms.catalog.commit(row.name)
    return Candidate(
        id=row.id,
        step=row.step,
        time_ns=saved_ns(rooms, commit),
        is_in_history=is_in_history,
        metrics=_metrics(rooms, commit.record) if needs_metrics else {},
    )


def _aged(rows: list[RecordRow], keep: Keep | None) -> set[CommitId]:
    """Return the commits whose moments are to go; *rows* begin with the newest of the history that goes on."""
    if keep is None or keep.drop_optimizer_older_than is None or not rows:
        return set()
    return {row.id for row in rows if row.step < rows[0].step - keep.drop_optimizer_older_than}


def _other_fates(rooms: Rooms, view: RunView) -> Iterable[Fate]:
    """Yield what becomes of hidden commits and of the records that only hide: none is needed any more."""
    shown = {row.id for row in view.visible}
    hiders = {hidden: row for row in view.rows.values() for hidden in row.supersedes}
    for row in view.rows.values():
        if row.id in shown:
            continue
        hider = hiders.get(row.id)
        if not row.layer_names:
            why = "it hides nothing any more"
        elif hider is not None and hider.layer_names:
            why = "replaced"
        elif hider is not None and rooms.catalog.commit(hider.name).record.policy.name == STAND_IN:
            why = "a collection that was stopped had begun to remove it"
        else:
            why = "dropped"
        yield Fate(row=row, kept_by=(), goes_because=why, is_visible=False)


def _stand_in(rooms: Rooms, row: RecordRow) -> Commit:
    record = rooms.catalog.commit(row.name).record
    return hiding_commit(record, row.id, policy=STAND_IN, decisions=what_resumed(record))


def _metrics(rooms: Rooms, record: CommitRecord) -> dict[str, float]:
    """Return what ``trainer_state.json`` says was measured at the step of *record*."""
    if not record.states:
        return {}
    for file in rooms.state(record.states[0]).files:
        if file.path == TRAINER_STATE:
            return _logged_at(content_of(rooms, file.content), record.step)
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


def waves(view: RunView, going: Collection[CommitId]) -> list[list[RecordRow]]:
    """Return the records *going* in groups: what a record hides is in an earlier one, so it never shows again."""
    left = {row.id: row for row in view.rows.values() if row.id in going}
    found = []
    while left:
        free = [row for row in left.values() if not left.keys() & set(row.supersedes)]
        found.append(free or list(left.values()))  # records that hide each other: whoever wrote those, all are hidden
        for row in found[-1]:
            del left[row.id]
    return found


def views_of(rooms: Rooms) -> list[RunView]:
    """
    Return what every run holds.

    Raises:
        IntegrityError: A record is damaged or has vanished: nobody knows then what it needs, or what it hides.
    """
    found = [view for view in (rooms.catalog.find(run) for run in rooms.catalog.runs()) if view is not None]
    for view in found:
        for problem in view.damaged.values():
            raise problem
    return found
