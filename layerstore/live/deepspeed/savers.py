"""Savers as the engine's side sees them: which are open, and which commit an engine's next saves follow."""

from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from layerstore.compose import Composition, compose_latest
from layerstore.errors import Conflict
from layerstore.history import Place, Resolved, place_after, place_begun
from layerstore.limits import LOAD_WAIT_SECONDS
from layerstore.live.deepspeed.engine import SavedStates
from layerstore.live.ranks import Exchange
from layerstore.storage import RunView
from layerstore.store import Store
from layerstore.zero3 import Pointer


class AttachedSaver(Protocol):
    """A saver, as checkpoint engines and loads use it."""

    store: Store
    run: str
    exchange: Exchange

    def take(self, states: SavedStates, *, folder: Path, tag: str) -> None:
        """Save *states*; more files may still be added to *folder*."""

    def pointer(self) -> Pointer:
        """Return the pointer to the next save."""

    def wait(self) -> None:
        """Return once no save is pending. Collective."""

    def publish(self, seconds: float) -> None:
        """Wait up to *seconds* until this rank's commits are visible. Not collective."""

    def went_to(self, composition: Composition | None) -> None:
        """Continue from *composition*, which the engine was filled with; None if that came from no store."""


OPEN_SAVERS: list[AttachedSaver] = []
"""The savers of this process that are not closed."""


def wait_for_saves(store_id: str, run: str) -> None:
    """
    Return once the saves of *run* that this process is writing are visible or given up. Not collective.

    Only the rank that commits waits.

    Raises:
        Locked: A save is still pending after `LOAD_WAIT_SECONDS`.
    """
    for saver in OPEN_SAVERS:
        if (saver.store.id, saver.run) == (store_id, run):
            saver.publish(LOAD_WAIT_SECONDS)


_FILLED: "WeakKeyDictionary[Any, tuple[str, Composition]]" = WeakKeyDictionary()
"""The commit that each engine's next save follows: it was filled with it, or has saved it; with the store's id."""

_HALF_LOADED: "WeakSet[Any]" = WeakSet()
"""Engines whose last load has failed after it began."""


def note_filled(engine: Any, store: Store, composition: Composition) -> None:
    """Note that *engine* holds *composition* of *store*."""
    _HALF_LOADED.discard(engine)
    _FILLED[engine] = store.id, composition


def note_emptied(engine: Any) -> None:
    """Note that a load of *engine* begins: no commit is known until it completes, or ever if it is not from a store."""
    _HALF_LOADED.discard(engine)
    _FILLED.pop(engine, None)


def note_half_loaded(engine: Any) -> None:
    """Note that a load of *engine* has failed half-way: nothing is saved until another one succeeds."""
    _FILLED.pop(engine, None)
    _HALF_LOADED.add(engine)


def note_closed(engine: Any, store: Store, run: str, *, attempt: int) -> None:
    """Let the next saver of *engine* continue from the tip of *attempt*, whose saver is closed now."""
    view = store.repo.catalog.find(run)
    rows = [] if view is None else view.of_attempt(attempt)
    if rows and engine not in _HALF_LOADED:
        tip = Resolved.of_commit(store.repo.catalog.commit(rows[-1].name))
        note_filled(engine, store, compose_latest(tip))


def note_left(engine: Any) -> None:
    """Note that an error ended a saver of *engine*: which of its saves became commits is unknown."""
    _FILLED.pop(engine, None)


def check_not_half_loaded(engine: Any) -> None:
    """Raise Conflict if the last load of *engine* has failed half-way."""
    if engine in _HALF_LOADED:
        raise Conflict(
            "the last load failed half-way, so the engine holds parts of two states",
            hint="load once more while a saver is attached, or call layerstore.resume",
        )


def filled_with(engine: Any, store: Store | None = None) -> Composition | None:
    """Return what the next save of *engine* follows; None if nothing or, given *store*, if it is in another store."""
    store_id, composition = _FILLED.get(engine, (None, None))
    return composition if store is None or store.id == store_id else None


def place_resumed(view: RunView | None, composition: Composition | None) -> Place:
    """Return the place of saves after an engine was filled with *composition*; None means from no commit."""
    if composition is None:
        return place_begun(view)
    base = composition.base
    record = composition.as_resolved().record
    return place_after(view, record, of_commit=composition.commit, is_as_it_stands=record.layers == base.layers)
