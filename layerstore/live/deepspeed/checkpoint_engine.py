"""
A checkpoint engine for DeepSpeed that makes ``save_checkpoint`` and ``load_checkpoint`` use the store.

A save is captured as in ``Saver.save`` and leaves pointer files in the folder. A load of pointers reads their target
from the store; DeepSpeed loads all other files as before.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from layerstore.compose import Composition, naming_damage
from layerstore.errors import Unsupported
from layerstore.live.binding import Binding, binding_of, wait_for_saves
from layerstore.live.deepspeed.capture import SavedStates, capture
from layerstore.live.deepspeed.engine import ZeroEngine, engine_with
from layerstore.live.deepspeed.load import Loaded, read_for, whole_weights
from layerstore.live.engine import Captured
from layerstore.live.pointer_files import (
    check_same,
    composition_of,
    first_shard_of,
    pointer_to_next,
    store_of,
    write_pointer,
)
from layerstore.live.ranks import Exchange
from layerstore.live.saver import Saver
from layerstore.store import Store
from layerstore.zero3 import Pointer, read_pointer
from layerstore.zero3.trees import ENGINE_KEYS

_MODEL, _OPTIMIZER = "_model_states.pt", "_optim_states.pt"


class StoreCheckpointEngine:
    """Wraps DeepSpeed's checkpoint engine: saves to the store, follows pointers into it, passes other files on."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.name = "layerstore"
        self._engine: ZeroEngine | None = None
        self._uninstall: Callable[[], None] = lambda: None
        self._held: dict[str, tuple[Any, Path]] = {}
        self._stop_handing_over: Callable[[], None] = lambda: None
        self._load: tuple[Pointer | None, Loaded] | None = None
        self._is_whole = True
        """Whether the current load includes the optimizer's state."""
        self._has_begun = False
        """Whether the current load has read anything yet."""

    # -- the saver -----------------------------------------------------------------------------------------------

    @property
    def saver(self) -> Saver | None:
        """The attached saver, which takes the engine's saves; None if none is attached."""
        return None if self._engine is None else self._engine.binding.saver

    def install(self, engine: ZeroEngine) -> None:
        """Make *engine* save and load through this checkpoint engine from now on."""
        self._engine = engine
        self._uninstall = engine.install(self)

    def uninstall(self) -> None:
        """Restore the engine."""
        self._stop_handing_over()
        self._uninstall()

    def settle(self) -> None:
        """Wait for all pending saves."""
        if self.saver is not None:
            self.saver.wait()

    # -- saving --------------------------------------------------------------------------------------------------

    def create(self, info: Any) -> None:
        """Begin a save."""
        self._held.clear()
        self._stop_handing_over()  # in case the previous save failed
        if self.saver is not None:
            self._stop_handing_over = self._known_engine().hand_over_model()
        self.real.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        """Hold one half of this rank's state until `commit`; pass all other files on."""
        kind = next((kind for kind in (_MODEL, _OPTIMIZER) if path.endswith(kind)), None)
        if self.saver is None or kind is None:
            self.real.save(state_dict, path)
            return
        self._held[kind] = state_dict, Path(path)

    def commit(self, info: Any) -> Any:
        """Once both halves of the state have arrived, save them to the store, and write pointers to the folder."""
        saver = self.saver
        self._stop_handing_over()
        if saver is not None and self._held.keys() == {_MODEL, _OPTIMIZER}:
            (model, model_path), (optimizer, optimizer_path) = self._held[_MODEL], self._held[_OPTIMIZER]
            self._held.clear()
            pointer = pointer_to_next(saver)
            self._take(
                saver,
                SavedStates(model=model, model_path=model_path, optimizer=optimizer, optimizer_path=optimizer_path),
            )
            # Only after the save has begun: if it is refused, the folder must not point to a commit that never comes.
            with saver.exchange.raise_on_all():
                # Also under stage 3's file name: stage 3 can continue from a save of stage 1 or 2.
                for_stage_3 = model_path.with_name(first_shard_of(self._known_engine().rank))
                for path in {model_path, for_stage_3, optimizer_path}:
                    write_pointer(saver.store.repo.files, path, pointer)
        return self.real.commit(info)

    def _take(self, saver: Saver, states: SavedStates) -> None:
        engine, options, folder = self._known_engine(), saver.options, states.model_path.parent.parent

        def captured() -> Captured:
            kept = engine.without_frozen(states) if options.excludes_frozen else states
            return capture(kept, rank=engine.rank, folder=folder, pattern=options.pattern)

        client_state = {key: value for key, value in states.model.items() if key not in ENGINE_KEYS}
        saver.take(captured, client_state=client_state, folder=folder, tag=states.model_path.parent.name)

    # -- loading -------------------------------------------------------------------------------------------------

    def fill(self, engine: ZeroEngine, loaded: Loaded) -> None:
        """Make *engine* load *loaded* with DeepSpeed's own loader, as if from a pointer."""
        # The engine gets empty files instead of pointers, so the target is set here.
        self._engine, self._load, self._has_begun = engine, (None, loaded), False
        try:
            engine.load(self, loaded.model(), tag=loaded.composition.base.layout.tag)
        except BaseException:
            if self._has_begun:
                engine.binding.fail_load()
            raise
        finally:
            self._load = None

    @contextmanager
    def loading(self, *, is_whole: bool, note: str) -> Iterator[None]:
        """
        Wrap one load by the engine; unless *is_whole*, the load omits the optimizer's state.

        The saver continues from the loaded commit; after a partial load, it starts from scratch.
        """
        self._is_whole, self._has_begun = is_whole, False
        try:
            yield
            if note and self._load is not None:
                self._known_engine().warn(self._load[1].name, note)
            if self._has_begun and self.saver is not None:
                self.saver.rebase_on(self._binding().composition_in(self.saver.store))
        except BaseException:
            if self._has_begun:
                self._binding().fail_load()
            raise
        finally:
            self._is_whole, self._load = True, None

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of *path* or, if *path* is a pointer, of its target."""
        if path.endswith(_MODEL):
            self.settle()  # the load changes masters, and unlike an update does not wait for pending copies by itself
            self._load = self._agreed_target(Path(path))
            self._has_begun = True
            self._binding().begin_load()
        if self._load is None or not path.endswith((_MODEL, _OPTIMIZER)):
            return self.real.load(path, map_location=map_location)
        _, loaded = self._load
        if path.endswith(_MODEL):
            return loaded.model()
        optimizer = loaded.optimizer()
        self._load = None  # the optimizer's state is loaded last: let go, so that only the engine holds its memory
        self._binding().hold(loaded.store, loaded.composition)
        self._known_engine().log("loaded %s from %s", loaded.name, loaded.store.repo.name)
        return optimizer

    def whole_weights(self, path: Path) -> dict[str, Any] | None:
        """Return all weights that the pointer *path* leads to, the same on all ranks; None if *path* is no pointer."""
        target = self._agreed_target(path)
        if target is None:
            return None
        pointer, loaded = target
        if self._load is not None and self._load[0] != pointer:
            self._known_engine().warn(
                "in a load without the optimizer's state, DeepSpeed takes weights from the folder named in 'latest'",
                f"weights are from {loaded.name}, everything else is from {self._load[1].name}",
            )
        with (
            closing(Exchange()) as exchange,
            exchange.raise_on_all(),
            naming_damage(loaded.store.repo, loaded.composition),
        ):
            return whole_weights(loaded.store, loaded.composition)

    def _agreed_target(self, path: Path) -> tuple[Pointer | None, Loaded] | None:
        """
        Return the pointer *path* and its target, the same on all ranks; None if *path* is not a pointer.

        If one rank cannot load the target, this raises on every rank, before the engine changes.
        """
        with closing(Exchange()) as exchange:
            with exchange.raise_on_all():
                pointer = read_pointer(path)
                if pointer is not None:
                    wait_for_saves(pointer.store_id, pointer.run)
            # DeepSpeed's loader reads its first file more than once, so the target may already be loaded.
            known = self._load if self._load is not None and self._load[0] == pointer else None
            with exchange.raise_on_all():
                found = (known[1].store, known[1].composition) if known else self._find_target(path, pointer)
            what = "shards" if found is None else f"a pointer to {found[1].commit}"
            check_same(exchange, path.parent, f"{what} (already read)" if known else what)
            if known or pointer is None or found is None:
                return known
            return pointer, self._read(exchange, pointer, *found)

    def _find_target(self, path: Path, pointer: Pointer | None) -> tuple[Store, Composition] | None:
        if pointer is None:
            return None
        if self._known_engine().loads_universal:
            raise Unsupported(
                f"{path.parent} holds pointers, but the engine loads universal checkpoints",
                hint=f"{pointer.command}; then convert FOLDER with DeepSpeed's ds_to_universal.py",
            )
        store = store_of(pointer, self.saver)
        return store, composition_of(store, pointer)

    def _read(self, exchange: Exchange, pointer: Pointer, store: Store, composition: Composition) -> Loaded:
        """Read and check this rank's part of *composition*, the target of *pointer*. Collective."""
        engine = self._known_engine()
        with exchange.raise_on_all(), naming_damage(store.repo, composition):
            loaded, notes = read_for(engine, exchange, store, composition, is_whole=self._is_whole)
        engine.warn(pointer.name, *notes)
        return loaded

    def _known_engine(self) -> ZeroEngine:
        return self._engine or ZeroEngine(engine_with(self))

    def _binding(self) -> Binding:
        # Not through a `ZeroEngine`, which refuses engines that cannot be saved: such an engine may still load.
        return binding_of(engine_with(self)) if self._engine is None else self._engine.binding

    # -- the rest of the interface -------------------------------------------------------------------------------

    def is_decoupled(self) -> bool:
        """Return False: DeepSpeed need not wait for saves."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Return False: tensors need not be cloned before they are passed on."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def checkpoint_engine_of(engine: ZeroEngine) -> StoreCheckpointEngine:
    """Return the checkpoint engine of *engine* or, if that is DeepSpeed's own, a wrapper, not installed yet."""
    current = engine.checkpoint_engine
    return current if isinstance(current, StoreCheckpointEngine) else StoreCheckpointEngine(current)
