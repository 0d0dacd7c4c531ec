"""
What training measured at a commit's step: losses and scores, by name.

They come from the checkpoint itself: what the Trainer logged at that step, and the numbers in client_state, at its
top level or under ``metrics``.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from layerstore.errors import IntegrityError, NotFound
from layerstore.filenames import TRAINER_STATE
from layerstore.json_text import parse_json
from layerstore.model import CommitRecord
from layerstore.states import RankState, SourceFile
from layerstore.storage import Repository, RunView
from layerstore.tree import Tree

METRICS = "metrics"
"""The key in client_state under which every number is a metric."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What training had measured by the time of a save."""

    at_save: dict[str, float]
    """At the save's own step, by name; some values may be NaN."""
    entries: Sequence[Mapping[str, object]]
    """All that the Trainer had logged."""

    def by_step(self) -> list[tuple[int, dict[str, float]]]:
        """Return every step that the Trainer had logged; a step that was also evaluated comes twice."""
        return [
            (int(step), dict(_floats(entry)))
            for entry in self.entries
            if isinstance(step := entry.get("step"), float) and step.is_integer()
        ]


def measured_by(repo: Repository, record: CommitRecord, *, view: RunView | None = None) -> Measured:
    """
    Return what training had measured by the time of the save *record*.

    A Trainer may save a step before logging it. If the commit's log has nothing for the step, the log of the attempt's
    next commit is used. Callers that ask about many commits pass the run's *view*.

    Raises:
        IntegrityError: The commit's state is damaged.
    """
    state = _first_state(repo, record)
    if state is None:
        return Measured({}, ())
    log = _trainer_log(state)
    if log is None:
        return Measured(_measured(state), ())
    entries = _log_history(repo.content_of(log.content))
    logged = _logged_at(entries, record.step) or _logged_later(repo, record, view or repo.catalog.find(record.run))
    return Measured(_measured(state) | logged, entries)


def metrics_if_sound(repo: Repository, record: CommitRecord, *, view: RunView | None = None) -> dict[str, float] | None:
    """Return what training measured at the step of *record*, or None if the commit's state is damaged."""
    try:
        return measured_by(repo, record, view=view).at_save
    except IntegrityError:
        return None


def _first_state(repo: Repository, record: CommitRecord) -> RankState | None:
    return repo.state(record.states[0]) if record.states else None


def _measured(state: RankState) -> dict[str, float]:
    """Return the numbers in client_state: all under ``metrics``, and the floats at its top level."""
    tree = state.model.tree
    match tree:
        case {"values": {"client_state": (_, dict(kept))}}:  # saved with FSDP2; see handover/dcp_state.py
            tree = kept
    if not isinstance(tree, dict):
        return {}
    metrics = tree.get(METRICS)
    return {name: value for name, value in tree.items() if isinstance(name, str) and isinstance(value, float)} | (
        _numbers(metrics) if isinstance(metrics, dict) else {}
    )


def _numbers(tree: Mapping[Tree, Tree]) -> dict[str, float]:
    numbers = {}
    for name, value in tree.items():
        if isinstance(name, str) and isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(OverflowError):  # an integer too large for a float is not a metric
                numbers[name] = float(value)
    return numbers


def _trainer_log(state: RankState) -> SourceFile | None:
    return next((file for file in state.files if file.path == TRAINER_STATE), None)


def _logged_later(repo: Repository, record: CommitRecord, view: RunView | None) -> dict[str, float]:
    """Return what the log of the attempt's next commit has for the step of *record*."""
    rows = [] if view is None else view.of_attempt(record.attempt)
    after = bisect_right(rows, record.step, key=attrgetter("step"))
    # If the next commit is damaged, that is reported when a caller asks for that commit itself.
    with suppress(IntegrityError, NotFound):
        for row in rows[after : after + 1]:
            state = _first_state(repo, repo.catalog.commit(row.name).record)
            log = None if state is None else _trainer_log(state)
            return {} if log is None else _logged_at(_log_history(repo.content_of(log.content)), record.step)
    return {}


def _logged_at(entries: Iterable[Mapping[str, object]], step: int) -> dict[str, float]:
    return {name: value for entry in entries if entry.get("step") == step for name, value in _floats(entry)}


def _log_history(data: bytes) -> list[dict[str, object]]:
    try:
        log = parse_json(data, parse_int=float)["log_history"]  # a score may be a whole number
        return [entry for entry in log if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []  # not written by the Trainer, so there are no metrics


def _floats(entry: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in entry.items() if isinstance(value, float) and name != "step")
