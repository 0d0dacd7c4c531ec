"""What the engine's side knows of savers: which ones are open, and which commit an engine's next saves follow."""

from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from layerstore.compose import Composition, compose_latest
from layerstore.history import Place, Resolved, place_after, place_begun
from layerstore.limits import LOAD_WAIT_SECONDS
from layerstore.live.engine.deepspeed import SavedStates
from layerstore.live.ranks import Exchange
from layerstore.storage import RunView
from layerstore.store import Store
from layerstore.zero3 import Pointer


class AttachedSaver(Protocol):
    """A saver, as a checkpoint engine and a load use it."""

    store: Store
    run: str
    exchange: Exchange

    def take(self, states: SavedStates, *, folder: Path, tag: str) -> None:
        """Save *states*; more files may still be added to *folder*."""

    def pointer(self) -> Pointer:
        """Return the pointer to the next save."""

    def wait(self) -> None:
        """Return once no save is under way. Collective."""

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
        Locked: A save is still under way after `LOAD_WAIT_SECONDS`.
    """
    for saver in OPEN_SAVERS:
        if (saver.store.id, saver.run) == (store_id, run):
            saver.publish(LOAD_WAIT_SECONDS)


_FILLED: "WeakKeyDictionary[Any, Composition]" = WeakKeyDictionary()
"""What each engine was last filled with from a store."""

_CLOSED: "WeakKeyDictionary[Any, dict[tuple[str, str], Composition]]" = WeakKeyDictionary()
"""The newest commit of each saver that was closed since then, by store and run."""


def note_filled(engine: Any, composition: Composition | None) -> None:
    """Note that *engine* was filled with *composition*; None if that came from no store."""
    _CLOSED.pop(engine, None)
    if composition is None:
        _FILLED.pop(engine, None)
    else:
        _FILLED[engine] = composition


def note_closed(engine: Any, store: Store, run: str, *, attempt: int) -> None:
    """Let the next saver of *run* continue *attempt*, whose saver is closed now."""
    view = store.repo.catalog.find(run)
    rows = [] if view is None else view.of_attempt(attempt)
    if rows:
        tip = Resolved.of_commit(store.repo.catalog.commit(rows[-1].name))
        _CLOSED.setdefault(engine, {})[store.id, run] = compose_latest(tip)


def filled_with(engine: Any) -> Composition | None:
    """Return what *engine* was last filled with from a store; None if it never was."""
    return _FILLED.get(engine)


def origin_of(engine: Any, store: Store, run: str) -> Composition | None:
    """Return what the next save of *engine* as *run* follows; None if nothing."""
    return _CLOSED.get(engine, {}).get((store.id, run)) or filled_with(engine)


def place_resumed(view: RunView | None, composition: Composition | None) -> Place:
    """Return where saves go after an engine was filled with *composition*; None: from no commit."""
    if composition is None:
        return place_begun(view)
    base = composition.base
    record = composition.as_resolved().record
    return place_after(view, record, of_commit=composition.commit, is_as_it_stands=record.layers == base.layers)
