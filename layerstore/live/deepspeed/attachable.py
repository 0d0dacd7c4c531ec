"""DeepSpeed's engine as an `Attachable`."""

from collections.abc import Callable
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from layerstore.compose import Composition
from layerstore.live.binding import Binding
from layerstore.live.deepspeed.checkpoint_engine import StoreCheckpointEngine, checkpoint_engine_of
from layerstore.live.deepspeed.engine import ZeroEngine
from layerstore.live.deepspeed.load import Loaded, read_for
from layerstore.live.engine import read_random_state
from layerstore.live.ranks import Exchange
from layerstore.rank_options import AdamStep
from layerstore.store import Store
from layerstore.zero3.trees import ENGINE_KEYS, TreeView


class AttachableEngine:
    """An engine under ZeRO, and the checkpoint engine through which it saves and loads."""

    def __init__(self, engine: object) -> None:
        self.engine = ZeroEngine(engine)
        self._loader: StoreCheckpointEngine = checkpoint_engine_of(self.engine)

    @property
    def binding(self) -> Binding:
        """The attached saver, and the commit that the engine holds."""
        return self.engine.binding

    def meet(self, exchange: Exchange) -> None:
        """Do nothing: under DeepSpeed, each rank knows its share."""

    def settle(self) -> None:
        """Wait for all pending saves. Collective."""
        self._loader.settle()

    def install(self) -> Callable[[], None]:
        """Make the engine save and load through the store; return a function that undoes this."""
        self._loader.install(self.engine)
        return self._loader.uninstall

    def read(
        self, exchange: Exchange, store: Store, composition: Composition, *, adam_step: AdamStep, like: str | None
    ) -> "EngineLoad":
        """Read *composition* and check that it fits. Collective, but may raise on one rank alone."""
        loaded, notes = read_for(self.engine, exchange, store, composition, adam_step=adam_step, like=like)
        return EngineLoad(self.engine, self._loader, loaded, notes)

    def fill(self, fill: Callable[[], None], exchange: Exchange) -> None:
        """Call *fill*: DeepSpeed's own loader is collective and needs no help."""
        del exchange
        fill()

    def warn(self, what: str, *notes: str) -> None:
        """Log *notes* about *what*, on one rank only."""
        self.engine.warn(what, *notes)


class EngineLoad:
    """One rank's part of a composite, read and checked, for an engine to load."""

    def __init__(
        self, engine: ZeroEngine, loader: StoreCheckpointEngine, loaded: Loaded, notes: tuple[str, ...]
    ) -> None:
        self._engine, self._loader, self._loaded, self.notes = engine, loader, loaded, notes
        state = loaded.load.state
        self.random_state = read_random_state(state, loaded.load.content, rank=engine.rank)

    @cached_property
    def client_state(self) -> dict[str, Any]:
        """The user's client_state."""
        return {key: value for key, value in self._loaded.model().items() if key not in ENGINE_KEYS}

    @property
    def counters(self) -> tuple[int, int, int]:
        """Updates, samples and skipped updates, as the engine counts them."""
        state = self._loaded.load.state.model
        view = TreeView(state.tree, path=PurePosixPath(state.path))
        return view["global_steps"].integer(), view["global_samples"].integer(), view["skipped_steps"].integer()

    def fill(self) -> None:
        """Load the composite with DeepSpeed's own loader."""
        self._loader.fill(self._engine, self._loaded)
