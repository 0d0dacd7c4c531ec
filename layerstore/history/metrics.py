"""
What training measured at a commit's step: losses and scores, by name.

They come from the checkpoint itself: what the Trainer logged at that step, and the numbers in DeepSpeed's client_state,
at its top or under ``metrics``.
"""

import json
from collections.abc import Mapping
from contextlib import suppress

from layerstore.errors import IntegrityError, NotFound
from layerstore.model import CommitRecord, RankState
from layerstore.storage import Repository
from layerstore.tree import Tree
from layerstore.zero3 import TRAINER_STATE

METRICS = "metrics"
"""The key in client_state whose numbers are all metrics."""


def metrics_of(repo: Repository, record: CommitRecord) -> dict[str, float]:
    """
    Return what training measured at the step of *record*, by name; some values may be NaN.

    A Trainer may save a step before it logs it, so the log of the attempt's next commit counts, too.

    Raises:
        IntegrityError: The commit's state is damaged.
    """
    state = _first_state(repo, record)
    if state is None:
        return {}
    return _measured(state) | _logged_later(repo, record) | _logged(repo, state, record.step)


def _first_state(repo: Repository, record: CommitRecord) -> RankState | None:
    return repo.state(record.states[0]) if record.states else None


def _measured(state: RankState) -> dict[str, float]:
    """Return the numbers in client_state: all under ``metrics``, and those with a fraction at its top."""
    tree = state.model.tree
    if not isinstance(tree, dict):
        return {}
    metrics = tree.get(METRICS)
    return {name: value for name, value in tree.items() if isinstance(name, str) and isinstance(value, float)} | (
        _numbers(metrics) if isinstance(metrics, dict) else {}
    )


def _numbers(tree: Mapping[Tree, Tree]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in tree.items()
        if isinstance(name, str) and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _logged_later(repo: Repository, record: CommitRecord) -> dict[str, float]:
    """Return what the log of the attempt's next commit has for the step of *record*."""
    later = (row for row in repo.catalog.view(record.run).of_attempt(record.attempt) if row.step > record.step)
    row = next(later, None)
    # A damaged one is reported by whoever reads it for its own sake.
    with suppress(IntegrityError, NotFound):
        state = None if row is None else _first_state(repo, repo.catalog.commit(row.name).record)
        return {} if state is None else _logged(repo, state, record.step)
    return {}


def _logged(repo: Repository, state: RankState, step: int) -> dict[str, float]:
    """Return what the Trainer's log in *state* has for *step*."""
    for file in state.files:
        if file.path == TRAINER_STATE:
            return _logged_at(repo.content_of(file.content), step)
    return {}


def _logged_at(data: bytes, step: int) -> dict[str, float]:
    try:
        entries = json.loads(data, parse_int=float)["log_history"]
        return {
            name: value
            for entry in entries
            if isinstance(entry, dict) and entry.get("step") == step
            for name, value in entry.items()
            if isinstance(value, float) and name != "step"
        }
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}  # not written by the Trainer, so there are no metrics
