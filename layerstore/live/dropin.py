"""
The engine's checkpoint engine: ``save_checkpoint`` and ``load_checkpoint`` go to the store, and whoever calls them.

What it saves is captured as ``Saver.save`` captures it; in the folder it leaves pointers. It loads pointers from the
store, and everything else as before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from layerstore.compose import Composition
from layerstore.errors import Conflict, IntegrityError, Unsupported
from layerstore.history.collected import losses_told
from layerstore.live.background import wait_for_saves
from layerstore.live.exchange import Exchange
from layerstore.live.following import composition_of
from layerstore.live.log import LOG
from layerstore.live.pointers import write_pointer
from layerstore.live.resume import Loaded
from layerstore.live.seams import Engine, SavedStates, engine_with
from layerstore.live.weights import whole_weights
from layerstore.store import Store, open_store
from layerstore.zero3 import Pointer, read_pointer

_MODEL, _OPTIMIZER = "_model_states.pt", "_optim_states.pt"


class Taking(Protocol):
    """What saves the states that an engine hands over."""

    @property
    def store(self) -> Store:
        """Where to."""

    @property
    def run(self) -> str:
        """As which run."""

    @property
    def exchange(self) -> Exchange:
        """With which ranks."""

    def take(self, states: SavedStates, *, folder: Path, tag: str) -> None:
        """Save *states*; more files may still come into *folder*."""

    def pointer(self) -> Pointer:
        """Return what leads to the next save."""

    def wait(self) -> None:
        """Return once nothing is on its way."""

    def went_to(self, composition: Composition | None) -> None:
        """Go on from *composition*, which the engine was filled with; None: with something that no store knows."""


class StoreCheckpointEngine:
    """Stands in for DeepSpeed's own checkpoint engine, which it keeps for all that is not a save of the whole state."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.name = "layerstore"
        self._savers: list[Taking] = []
        self._engine: Engine | None = None
        self._uninstall: Callable[[], None] | None = None
        self.loaded: Composition | None = None
        """What the engine was last filled with, if it came from a store."""
        self.trouble = ""
        """Why what the engine holds is nothing to save: a load has failed half-way."""
        self._held: dict[str, tuple[Any, Path]] = {}
        self._load: tuple[Pointer, Loaded] | None = None
        self._is_whole = True
        """Whether the optimizer's state is loaded too."""
        self._has_begun = False
        """Whether anything was loaded yet."""

    # -- who is attached -----------------------------------------------------------------------------------------

    @property
    def saver(self) -> Taking | None:
        """What the engine's own saves go to: the saver that was attached last."""
        return self._savers[-1] if self._savers else None

    def attach(self, saver: Taking, engine: Engine) -> None:
        """Save *engine* to *saver* from now on."""
        self._savers.append(saver)
        self._engine = engine
        if self._uninstall is None:
            self._uninstall = engine.install(self)

    def detach(self, saver: Taking) -> None:
        """Save to whoever was attached before *saver*; the last one that goes leaves the engine as it was found."""
        self._savers = [other for other in self._savers if other is not saver]
        if not self._savers and self._uninstall is not None:
            self._uninstall()
            self._uninstall = None

    def saves_to(self, store: Store, run: str) -> bool:
        """Whether a saver that is not closed saves run *run* of *store*."""
        return any((saver.store.id, saver.run) == (store.id, run) for saver in self._savers)

    def settle(self) -> None:
        """Wait for whatever is on its way."""
        for saver in self._savers:
            saver.wait()

    def went_to(self, composition: Composition | None) -> None:
        """Let all that save the engine go on from *composition*, which it was filled with, or None that we know."""
        self.trouble = ""
        for saver in self._savers:
            saver.went_to(composition)

    # -- saving --------------------------------------------------------------------------------------------------

    def create(self, info: Any) -> None:
        """Begin a save."""
        self._held.clear()
        self.real.create(info)

    def save(self, state_dict: Any, path: str) -> None:
        """Hold one rank's half of a save, and leave a pointer for it; write everything else as before."""
        kind = next((kind for kind in (_MODEL, _OPTIMIZER) if path.endswith(kind)), None)
        if self.saver is None or kind is None:
            self.real.save(state_dict, path)
            return
        self._held[kind] = state_dict, Path(path)

    def commit(self, info: Any) -> Any:
        """Save what is held, once both halves are there."""
        saver = self.saver
        if saver is not None and self._held.keys() == {_MODEL, _OPTIMIZER}:
            (model, model_path), (optimizer, optimizer_path) = self._held[_MODEL], self._held[_OPTIMIZER]
            self._held.clear()
            pointer = saver.pointer()
            saver.take(
                SavedStates(model=model, model_path=model_path, optimizer=optimizer, optimizer_path=optimizer_path),
                folder=model_path.parent.parent,
                tag=model_path.parent.name,
            )
            with saver.exchange.together():
                for path in (model_path, optimizer_path):
                    write_pointer(saver.store.rooms.files, path, pointer)
        return self.real.commit(info)

    # -- loading -------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self, *, is_whole: bool, note: str) -> Iterator[None]:
        """
        Surround one load of the engine; not *is_whole*: one without the optimizer's state. *note* is for pointers.

        Savers go on from what was loaded, and begin anew if that was not all that a commit holds.
        """
        self._is_whole, self._has_begun = is_whole, False
        try:
            try:
                yield
            except BaseException:
                if self._has_begun:
                    self.trouble = "the last load_checkpoint failed half-way, so the engine holds parts of two states"
                raise
            if note and self._load is not None and self._known_engine().global_rank == 0:
                LOG.warning("%s: %s", self._load[0].name, note)
            if self._has_begun:
                self.went_to(self.loaded)
        finally:
            self._is_whole, self._load = True, None

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return what *path* holds, or what it points at."""
        if path.endswith(_MODEL):
            self.settle()  # what is loaded changes masters without an update, and no gate holds it
            self._load = self._agreed(Path(path))
            self._has_begun, self.loaded = True, None
        if self._load is None or not path.endswith((_MODEL, _OPTIMIZER)):
            return self.real.load(path, map_location=map_location)
        _, loaded = self._load
        if path.endswith(_MODEL):
            return loaded.model()
        optimizer = loaded.optimizer()
        self._load = None  # the optimizer's state is the last that is asked for, and the engine's own from now on
        self.loaded = loaded.composition
        return optimizer

    def whole_weights(self, path: Path) -> dict[str, Any] | None:
        """Return all weights that the pointer *path* means, the same on all ranks; None if it is none."""
        found = self._agreed(path)
        if found is None:
            return None
        pointer, loaded = found
        if self._load is not None and self._load[0] != pointer and self._known_engine().global_rank == 0:
            LOG.warning(
                "without the optimizer's state DeepSpeed takes weights from the folder that 'latest' names: "
                "they are those of %s, all else is of %s",
                pointer.name,
                self._load[0].name,
            )
        exchange = Exchange()
        try:
            with exchange.together():
                store = self._store_of(pointer)
                with losses_told(store.rooms, loaded.composition):
                    return whole_weights(store, loaded.composition)
        finally:
            exchange.close()

    def _agreed(self, path: Path) -> tuple[Pointer, Loaded] | None:
        """
        Return what the pointer *path* means, None if it is none: before the engine changes, and the same on all ranks.

        What one rank cannot load is loaded by none.
        """
        exchange = Exchange()
        try:
            with exchange.together():
                pointer = read_pointer(path)
                if pointer is not None:
                    wait_for_saves(pointer.store_id, pointer.run)
            with exchange.together():
                found = self._found(path, pointer)
            texts = exchange.texts("shards" if found is None else f"a pointer to {found[1].composition.commit}")
            for rank, text in enumerate(texts):
                if text != texts[0]:
                    raise IntegrityError(
                        f"the ranks cannot load {path.parent}: rank 0 finds {texts[0]} there, rank {rank} {text}",
                        hint="does every host see the same folder? layerstore.transformers.checkpoint makes a new one",
                    )
        finally:
            exchange.close()
        return found

    def _found(self, path: Path, pointer: Pointer | None) -> tuple[Pointer, Loaded] | None:
        # The loader asks for its first half more than once.
        if pointer is None or (self._load is not None and self._load[0] == pointer):
            return None if pointer is None else self._load
        engine = self._known_engine()
        if engine.loads_universal:
            raise Unsupported(
                f"{path.parent} holds pointers, and the engine loads universal checkpoints",
                hint=f"{pointer.command}; then DeepSpeed's ds_to_universal.py makes one of FOLDER",
            )
        store = self._store_of(pointer)
        composition = composition_of(store, pointer)
        with losses_told(store.rooms, composition):
            loaded = Loaded.of(store, composition, rank=engine.rank, world_size=engine.world_size)
            notes = loaded.fit(engine, is_whole=self._is_whole)
        for note in notes if engine.global_rank == 0 else ():
            LOG.warning("%s: %s", pointer.name, note)
        return pointer, loaded

    def _known_engine(self) -> Engine:
        return self._engine or Engine(engine_with(self))

    def _store_of(self, pointer: Pointer) -> Store:
        if self.saver is not None and self.saver.store.id == pointer.store_id:
            return self.saver.store  # wherever it lies by now
        store = open_store(pointer.store)
        if store.id != pointer.store_id:
            raise Conflict(
                f"the pointer leads to {pointer.name} of another store than {pointer.store} is now",
                hint="attach a saver to the right store first",
            )
        return store

    # -- the rest of the interface -------------------------------------------------------------------------------

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # DeepSpeed's signature
        """Make a folder."""
        self.real.makedirs(path, exist_ok=exist_ok)

    def is_decoupled(self) -> bool:
        """Tell that DeepSpeed need not wait for anything itself."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Tell that tensors need not be cloned before they are handed over."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def drop_in(engine: Engine, saver: Taking) -> StoreCheckpointEngine:
    """Return what *engine* is to save and load with: the one that it has, if that is ours already."""
    found = engine.checkpoint_engine
    made = found if isinstance(found, StoreCheckpointEngine) else StoreCheckpointEngine(found)
    made.attach(saver, engine)
    return made
