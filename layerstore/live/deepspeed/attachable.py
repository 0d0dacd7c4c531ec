"""DeepSpeed's engine as an `Attachable`."""

from collections.abc import Callable
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from layerstore.compose import Composition
from layerstore.live.binding import Binding
from layerstore.live.deepspeed.checkpoint_engine import StoreCheckpointEngine, checkpoint_engine_of
from layerstore.live.deepspeed.engine import ZeroEngine
from layerstore.live.deepspeed.load import Loaded, needs_own_slices
from layerstore.live.engine import read_random_state
from layerstore.live.ranks import Exchange, OwnVersions, own_versions, versions_to_load
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
        """Its saver and the commit that it holds."""
        return self.engine.binding

    def meet(self, exchange: Exchange) -> None:
        """Do nothing: each rank of DeepSpeed knows its share."""

    def settle(self) -> None:
        """Wait for all pending saves. Collective."""
        self._loader.settle()

    def install(self) -> Callable[[], None]:
        """Make it save and load through the store; return a function that undoes it."""
        self._loader.install(self.engine)
        return self._loader.uninstall

    def own_versions(self, exchange: Exchange, store: Store, composition: Composition) -> OwnVersions:
        """Return what versions of *composition* say about this rank's slices, if it needs no others. Collective."""
        needs_all = not needs_own_slices(self.engine, composition)
        return {} if needs_all else own_versions(exchange, store.repo, versions_to_load(composition))

    def read(
        self,
        store: Store,
        composition: Composition,
        *,
        adam_step: AdamStep,
        like: str | None,
        own_versions: OwnVersions,
    ) -> "EngineLoad":
        """Read *composition*, but for *own_versions*, and check that it fits."""
        return EngineLoad(
            self.engine,
            self._loader,
            store,
            composition,
            adam_step=adam_step,
            like=like,
            own_versions=own_versions,
        )

    def fill(self, fill: Callable[[], None], exchange: Exchange) -> None:
        """Call *fill*: DeepSpeed's own loader is collective and needs no help."""
        del exchange
        fill()

    def warn(self, what: str, *notes: str) -> None:
        """Log *notes* on *what*, on one rank only."""
        self.engine.warn(what, *notes)


class EngineLoad:
    """A composite for one rank of an engine."""

    def __init__(
        self,
        engine: ZeroEngine,
        loader: StoreCheckpointEngine,
        store: Store,
        composition: Composition,
        *,
        adam_step: AdamStep,
        like: str | None,
        own_versions: OwnVersions,
    ) -> None:
        """Read and check it; raises as `Loaded.check_fits` does."""
        self._engine, self._loader = engine, loader
        self._loaded = loaded = Loaded(
            store,
            composition,
            rank=engine.rank,
            world_size=engine.world_size,
            stage=engine.stage,
            adam_step=adam_step,
            like=like,
            own_versions=own_versions,
        )
        self.notes = loaded.check_fits(engine)
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
        """Load it with DeepSpeed's own loader."""
        self._loader.fill(self._engine, self._loaded)
