"""DeepSpeed's own checkpoints of an engine that a saver is attached to: what live saves are compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from layerstore.format import encode_state
from layerstore.model import CommitRecord, RankState
from layerstore.store import Store
from layerstore.zero3 import RANDOM_STATE


@contextmanager
def plainly(engine: Any) -> Iterator[None]:
    """Let *engine* save files as if nothing were attached to it."""
    attached = engine.checkpoint_engine
    engine.checkpoint_engine = getattr(attached, "real", attached)
    try:
        yield
    finally:
        engine.checkpoint_engine = attached


def states_of(store: Store, record: CommitRecord) -> list[bytes]:
    """Return all ranks' states of *record*, but for their random states: DeepSpeed's own checkpoints have none."""
    return [encode_state(_without_random_state(store.repo.state(ref))) for ref in record.states]


def _without_random_state(state: RankState) -> RankState:
    return replace(state, files=tuple(file for file in state.files if not RANDOM_STATE.fullmatch(file.path)))
