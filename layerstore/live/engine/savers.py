"""What the engine's side knows of savers, and the savers of this process that are open."""

from pathlib import Path
from typing import Protocol

from layerstore.compose import Composition
from layerstore.limits import LOAD_WAIT_SECONDS
from layerstore.live.engine.deepspeed import SavedStates
from layerstore.live.ranks import Exchange
from layerstore.store import Store
from layerstore.zero3 import Pointer


class AttachedSaver(Protocol):
    """A saver, as a checkpoint engine and a load use it."""

    @property
    def store(self) -> Store:
        """The store that it saves to."""

    @property
    def run(self) -> str:
        """The run that it saves."""

    @property
    def exchange(self) -> Exchange:
        """The ranks that save together."""

    def take(self, states: SavedStates, *, folder: Path, tag: str) -> None:
        """Save *states*; more files may still come into *folder*."""

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

    Only the rank that commits waits: the other ranks' parts are complete without waiting.

    Raises:
        Locked: A save is still under way after `LOAD_WAIT_SECONDS`.
    """
    for saver in OPEN_SAVERS:
        if (saver.store.id, saver.run) == (store_id, run):
            saver.publish(LOAD_WAIT_SECONDS)
