"""
Resolve references to commits: ``RUN@STEP``, ``RUN``, ``RUN~1``, ``RUN~1@STEP``, a commit's id or a pin's name.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

from layerstore.errors import Conflict, InvalidInput, NotFound
from layerstore.format import commit_id
from layerstore.layers import Reference, parse_reference, typed
from layerstore.model import Commit, CommitId, CommitRecord, Pin, Saving
from layerstore.nearest import did_you_mean
from layerstore.storage import RecordRow, Repository, RunView
from layerstore.units import SHORT_ID_DIGITS, short_id

# The fewest digits that may stand for a commit's id, as in git.
_ID_DIGITS_MIN = 4
_COMMIT_ID = re.compile(f"[0-9a-f]{{{_ID_DIGITS_MIN},32}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a reference resolves to."""

    record: CommitRecord
    commit: CommitId
    """The id of the commit, or of a pin's base."""
    pin: str | None
    """The pin's name, if the reference is a pin."""
    time_ns: int
    """When the commit or pin was written, by the writer's clock."""

    @classmethod
    def of_commit(cls, commit: Commit) -> Self:
        """Return *commit* as resolved."""
        return cls(record=commit.record, commit=commit.id, pin=None, time_ns=commit.observed.time_ns)

    @classmethod
    def of_pin(cls, pin: Pin) -> Self:
        """Return *pin* as resolved."""
        return cls(record=pin.record, commit=pin.base, pin=pin.name, time_ns=pin.observed.time_ns)

    @property
    def is_mixture(self) -> bool:
        """Whether it is a pinned composite of several saves."""
        if self.pin is None or self.record.policy.name == "latest" or commit_id(self.record) == self.commit:
            return False
        return len({entry.origin for entry in self.record.layers}) > 1


def only_run(repo: Repository) -> str:
    """Return the store's only run; if there are several, raises InvalidInput listing them."""
    runs = repo.catalog.runs()
    if not runs:
        was_dropped = bool(repo.trash.records())
        raise NotFound(
            "the store holds no commit yet",
            hint="layerstore log --dropped lists what was dropped" if was_dropped else "layerstore ingest CHECKPOINT",
        )
    if len(runs) > 1:
        more = ", …" if len(runs) > 10 else ""
        raise InvalidInput(
            f"the store holds {len(runs)} runs: {', '.join(runs[:10])}{more}", hint="name one: RUN or RUN@STEP"
        )
    return runs[0]


def resolve(repo: Repository, text: str | None) -> Resolved:
    """
    Return the record that *text* refers to; None stands for the tip of the store's only run.

    Raises:
        NotFound: There is no such run, attempt, step, pin or commit.
        InvalidInput: Several commits' ids begin with *text*.
        Conflict: That step has two commits.
    """
    located = locate(repo, only_run(repo) if text is None else text, pins=repo.records.pin_names())
    if isinstance(located, Resolved):
        return located
    return Resolved.of_commit(repo.catalog.commit(located.name))


def locate(
    repo: Repository, text: str, *, pins: Collection[str], view_of: Callable[[str], RunView] | None = None
) -> RecordRow | Resolved:
    """
    Return the row of the commit that *text* refers to, or the pin; raises as ``resolve`` does.

    *view_of* may return a run's view from a cache, for callers who look up many references.
    """
    reference = parse_reference(text)
    # If a run and a pin with the same name were made at the same moment, the run takes precedence.
    if reference.name in pins and not repo.records.names(reference.name):
        if reference.back or reference.step is not None:
            raise InvalidInput(
                f"{reference.name!r} is a pin: it refers to one commit and takes no ~ or @",
                hint=f"layerstore show {typed(reference.name)}",
            )
        return Resolved.of_pin(repo.records.read_pin(reference.name))
    if begins_id(text) and not repo.records.names(text) and (row := _by_id(repo, text)) is not None:
        return row
    view = (view_of or repo.catalog.view)(reference.name)
    try:
        return find_row(view, reference)
    except NotFound as exc:
        exc.hint = _hint_at_dropped_step(repo, view, reference) or exc.hint
        raise


def _hint_at_dropped_step(repo: Repository, view: RunView, reference: Reference) -> str | None:
    """Return the hint for a step that exists only in the trash."""
    if reference.step is None or reference.back or any(row.step == reference.step for row in view.visible):
        return None
    dropped = [name for name in repo.trash.records() if (name.run, name.step) == (view.run, reference.step)]
    if len(dropped) > 1:
        return f"{len(dropped)} commits of it were dropped: layerstore log {typed(view.run)} --dropped lists them"
    return f"it was dropped: layerstore undrop {short_id(dropped[0].id)} brings it back" if dropped else None


def begins_id(text: str) -> bool:
    """Whether *text* may be the beginning of a commit's id; a short number counts as a step without its run."""
    return _COMMIT_ID.fullmatch(text) is not None and not (text.isdecimal() and len(text) < SHORT_ID_DIGITS)


def ambiguous_id(text: str, ids: Iterable[str]) -> InvalidInput:
    """Return the error for *text*, which several *ids* begin with."""
    known = list(ids)
    return InvalidInput(
        f"{len(known)} commits begin with {text!r}",
        hint=f"write more of the id: {', '.join(short_id(commit_id) for commit_id in known[:4])}",
    )


def _by_id(repo: Repository, text: str) -> RecordRow | Resolved | None:
    """Return the commit whose id begins with *text*, visible or else in the trash; None if *text* may be a run."""
    views = (repo.catalog.view(run) for run in repo.catalog.runs())
    rows = [row for view in views for row in view.visible if row.id.startswith(text)]
    if len(rows) == 1:
        return rows[0]
    dropped = [] if rows else [name for name in repo.trash.records() if name.id.startswith(text)]
    if len(dropped) == 1:
        return Resolved.of_commit(repo.trash.read_record(dropped[0]))
    if rows or dropped:
        raise ambiguous_id(text, (commit.id for commit in rows or dropped))
    # Text at least as long as the ids in `log` was meant as an id; shorter text may be the name of a run.
    if len(text) >= SHORT_ID_DIGITS:
        raise NotFound(
            f"there is no run {text!r} in this store, and no commit of that id", hint="layerstore log", name=text
        )
    return None


def find_row(view: RunView, reference: Reference) -> RecordRow:
    """Return the row of *view* that *reference* refers to."""
    attempts = view.attempts
    if reference.back or not attempts:
        # A damaged record may be the only one of its attempt, which is then not counted. If there are no attempts, all
        # records are damaged, because the last of several commits that replace each other is always visible.
        _raise_damaged(view)
    if reference.back >= len(attempts):
        raise NotFound(
            f"run {view.run!r} has no attempt ~{reference.back}: ~N counts attempts back from the newest, "
            f"and it has {len(attempts)}",
            hint=f"layerstore log {typed(view.run)}; write a step as {view.run}@STEP",
        )
    attempt = attempts[-1 - reference.back]
    step = reference.step if reference.step is not None else next(view.history(attempt)).step
    _check_undamaged(view, step, tip=reference.step is None)
    rows = list(takewhile(lambda row: row.step == step, view.history(attempt, step=step)))
    if not rows:
        _raise_damaged(view)
        raise _no_such_step(view, reference, attempt)
    return _only(view, rows)


def _check_undamaged(view: RunView, step: int, *, tip: bool) -> None:
    """
    Raise if a damaged record might be the requested one: at *step*, or, if the *tip* is requested, after *step*.

    The damaged record might also supersede an intact record, which must not silently become visible again.
    """
    for name, problem in view.damaged.items():
        if name.step == step or (tip and name.step > step):
            raise problem


def _raise_damaged(view: RunView) -> None:
    for problem in view.damaged.values():
        raise problem


def _only(view: RunView, rows: list[RecordRow]) -> RecordRow:
    newest = [row for row in rows if row.attempt == max(other.attempt for other in rows)]
    if len(newest) > 1:
        ids = ", ".join(short_id(row.id) for row in newest)
        raise Conflict(
            f"{view.run}@{newest[0].step} is ambiguous: this step has {len(newest)} commits: {ids}",
            hint=f"layerstore drop {short_id(newest[0].id)} moves one to the trash; a commit's id works everywhere",
        )
    return newest[0]


def _no_such_step(view: RunView, reference: Reference, attempt: int) -> Exception:
    elsewhere = [row for row in view.visible if row.step == reference.step]
    if elsewhere:
        back = len(view.attempts) - 1 - view.attempts.index(elsewhere[-1].attempt)
        attempt_named = f"{view.run}~{back}"
        return NotFound(
            f"{view.run}@{reference.step} belongs to an earlier attempt",
            hint=f'{attempt_named}@{reference.step} refers to it; in Python, use resume(…, run="{attempt_named}")',
        )
    rows = list(view.history(attempt))[::-1]
    steps = [str(row.step) for row in rows]
    shown = ", ".join(steps if len(steps) <= 12 else [*steps[:5], "…", *steps[-5:]])
    prefix = f"{view.run}~{reference.back}" if reference.back else view.run
    nearby = [f"{prefix}@{step}" for step in _around(reference.step or 0, [row.step for row in rows])]
    hint = did_you_mean(nearby, else_=f"steps here: {shown}")
    return NotFound(f"run {view.run!r} has no step {reference.step}", hint=hint)


def _around(step: int, steps: list[int]) -> list[int]:
    """Return the nearest of *steps* before and after *step*."""
    place = bisect_left(steps, step)
    return steps[max(place - 1, 0) : place + 1]


def reference_to(repo: Repository, save: Saving) -> str:
    """
    Return the reference to the commit *save*: ``RUN@STEP``, or ``RUN~1@STEP`` if it belongs to an earlier attempt.

    If *save* is hidden and another commit has taken its step, the attempt of *save* is added in words.
    """
    return references_to(repo, [save])[0]


def references_to(repo: Repository, saves: Iterable[Saving]) -> list[str]:
    """Return `reference_to` of each of *saves*; each run is looked up once."""
    views: dict[str, RunView | None] = {}
    references = []
    for save in saves:
        if save.run not in views:
            views[save.run] = repo.catalog.find(save.run)
        references.append(_reference(views[save.run], save))
    return references


def _reference(view: RunView | None, save: Saving) -> str:
    plain = f"{save.run}@{save.step}"
    if view is None or not view.attempts:
        return plain  # nothing is left of the run, so this is unambiguous
    attempts = view.attempts
    plain_attempt = _attempt_meant(view, attempts[-1], save.step)
    if plain_attempt == save.attempt:
        return plain
    if save.attempt in attempts and _attempt_meant(view, save.attempt, save.step) == save.attempt:
        back = len(attempts) - 1 - attempts.index(save.attempt)
        return f"{save.run}~{back}@{save.step}"
    return plain if plain_attempt is None else f"{plain} of attempt {save.attempt}"


def _attempt_meant(view: RunView, attempt: int, step: int) -> int | None:
    """Return the attempt that *step* belongs to in the history of *attempt*."""
    row = next(view.history(attempt, step=step), None)
    return row.attempt if row is not None and row.step == step else None
