"""The tie between an engine and a store: the engine's saver, and the commit that its next save follows."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from layerstore.compose import Composition, compose_latest
from layerstore.errors import Conflict, LayerstoreError
from layerstore.history import Resolved
from layerstore.limits import LOAD_WAIT_SECONDS
from layerstore.live.log import LOG, one_line
from layerstore.live.saver import Saver
from layerstore.store import Store


@dataclass(slots=True, eq=False)
class Binding:
    """The saver and the commit of one engine; `binding_of` returns it."""

    saver: Saver | None = None
    """The saver that is attached."""
    store_id: str = ""
    place: str = ""
    """The folder or URL of the store, for messages."""
    composition: Composition | None = None
    """The composite that the engine was filled with, or last saved, in the store *store_id*."""
    is_half_loaded: bool = False
    """Whether the last load failed after it began to change the engine."""

    def composition_in(self, store: Store) -> Composition | None:
        """Return the composite that the next save to *store* follows; None if it is unknown or in another store."""
        return self.composition if self.store_id == store.id else None

    def hold(self, store: Store, composition: Composition) -> None:
        """Record that the engine holds *composition* of *store*."""
        self.store_id, self.place = store.id, store.repo.name
        self.composition, self.is_half_loaded = composition, False

    def begin_load(self) -> None:
        """Record that a load begins: the commit is now unknown, and stays unknown if the load does not read a store."""
        self.composition, self.is_half_loaded = None, False

    def fail_load(self) -> None:
        """Record that a load failed half-way: nothing is saved until another load succeeds."""
        self.composition, self.is_half_loaded = None, True

    def check_fully_loaded(self) -> None:
        """Raise Conflict if the last load failed half-way."""
        if self.is_half_loaded:
            raise Conflict(
                "the last load failed half-way, so the model holds parts of two states",
                hint="load again while a saver is attached, or call layerstore.resume",
            )

    def release(self, attempt: int | None) -> None:
        """
        Let the next saver continue from the tip of *attempt*, whose saver is now closed.

        *attempt* is None if an error ended the saver, so that it is unknown which of its saves became commits.
        """
        saver, self.saver = self.saver, None
        if attempt is None or saver is None:
            self.composition = None
            return
        repo = saver.store.repo
        try:
            repo.records.refresh()  # ranks that do not commit may not have read these commits yet
            view = repo.catalog.find(saver.run)
            rows = [] if view is None else view.of_attempt(attempt)
            if rows and not self.is_half_loaded:
                self.hold(saver.store, compose_latest(Resolved.of_commit(repo.catalog.commit(rows[-1].name))))
        except LayerstoreError as exc:  # no reason to fail a training run that is over
            self.composition = None
            LOG.error("the last save cannot be read: %s; the next saver begins a new attempt", one_line(exc))


# Weak, so that a binding does not keep an engine, and its memory on the device, alive.
_BINDINGS: "WeakKeyDictionary[Any, Binding]" = WeakKeyDictionary()


def binding_of(engine: Any) -> Binding:
    """Return the binding of *engine*: DeepSpeed's engine or the module itself."""
    return _BINDINGS.setdefault(engine, Binding())


def wait_for_saves(store_id: str, run: str) -> None:
    """
    Return once the saves of *run* that this process is writing are visible or given up. Not collective.

    Only the rank that commits waits for that. If each node has its own first level, every rank also waits a while for
    its saves to leave that level.

    Raises:
        Locked: A save is still pending after `LOAD_WAIT_SECONDS`.
    """
    for saver in [binding.saver for binding in _BINDINGS.values()]:
        if saver is not None and (saver.store.id, saver.run) == (store_id, run):
            saver.publish(LOAD_WAIT_SECONDS)
