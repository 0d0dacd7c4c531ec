"""
Resume: a live engine goes on from the store, with no shard written to disk.

The engine's own loader does it, fed from memory: so parameters that stay gathered, half-precision copies and whatever
else hangs on the masters come out right. Which version of each layer that is, a query says.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal
from weakref import WeakKeyDictionary

from layerstore.composite import Composite
from layerstore.errors import IntegrityError, LayoutMismatch, NotFound
from layerstore.live.background import LOG
from layerstore.live.exchange import Exchange
from layerstore.live.randomness import restore_random_state
from layerstore.live.revive import bytes_of, empty, revive
from layerstore.live.seams import Engine
from layerstore.ops.composition import Composition, as_resolved
from layerstore.ops.loading import RankLoad, plan_load
from layerstore.ops.past import view_or_none
from layerstore.ops.place import Place, place_after
from layerstore.ops.ranks import AdamStep
from layerstore.policy import Policy
from layerstore.storage.runview import RunView
from layerstore.store import Store, StrPath, open_store
from layerstore.tree import Storage, Tree
from layerstore.zero3.trees import TreeView

# What DeepSpeed puts into a rank's model_states; whatever else is there, the user has put there.
_ENGINE_KEYS = """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size
    mp_world_size checkpoint_parallel_dimensions num_experts ds_config ds_version ds_autoep_layers autoep_layers
    universal_checkpoint_info folding
"""
ENGINE_KEYS = frozenset(_ENGINE_KEYS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What an engine goes on from."""

    run: str
    step: int
    """The trainer's step of the base."""
    global_steps: int
    """DeepSpeed's own counters."""
    global_samples: int
    skipped_steps: int
    client_state: dict[str, Any]
    """What was handed to ``save``."""
    layers: dict[str, int]
    """The step that each layer's version was saved at."""
    random_state_restored: bool
    notes: tuple[str, ...]
    """What did not carry over."""


_RESUMED: "WeakKeyDictionary[Any, Composition]" = WeakKeyDictionary()


def resumed_composition(engine: Any) -> Composition | None:
    """Return what *engine* was filled from, None if it was not."""
    return _RESUMED.get(engine)


def place_resumed(view: RunView | None, composition: Composition) -> Place:
    """Return where the saves go that come after an engine was filled from *composition*."""
    base = composition.base
    record = as_resolved(composition).record
    return place_after(view, record, of_commit=composition.commit, is_as_it_stands=record.layers == base.layers)


def resume(
    engine: Any,
    store: Store | StrPath,
    *,
    run: str,
    step: int | Literal["latest"] = "latest",
    policy: str | Policy = "latest",
    adam_step: AdamStep = "unify",
    must_exist: bool = False,
) -> Resumed | None:
    """
    Fill *engine* from run *run* of *store*, at the engine's own world size; None where the run has no commit yet.

    Every rank calls it. A saver that is attached afterwards goes on with the newest attempt if this was its newest
    step, and opens the next one if it was not. *policy* says which version of each layer is taken, seen from *step*.

    Raises:
        NotFound: There is no such step, or with *must_exist* no commit at all.
        LayoutMismatch: The layers are not this engine's.
    """
    known = Engine(engine)
    opened = store if isinstance(store, Store) else open_store(store)
    view = view_or_none(opened.rooms, run)
    if view is None or not view.rows:
        if must_exist:
            raise NotFound(f"run {run!r} has no commit to resume from", hint=f"runs here: {', '.join(opened.runs)}")
        return None
    return fill(known, opened, opened.compose(run if step == "latest" else f"{run}@{step}", policy=policy), adam_step)


def fill(engine: Engine, store: Store, composite: Composite, adam_step: AdamStep = "unify") -> Resumed:
    """Fill *engine* from *composite*."""
    composition = composite.composition
    saved_by = composition.base.world_size
    exchange = Exchange()
    try:
        with exchange.together():
            load = plan_load(
                store.rooms, composition, rank=engine.rank, world_size=engine.world_size, adam_step=adam_step
            )
            _check_precision(engine, load)
        if len(set(exchange.texts(composition.commit))) > 1:
            raise IntegrityError("the ranks resume from different commits", hint="does every host see the same store?")
        with exchange.together():
            model, optimizer = (_Revived(load, file.tree) for file in (load.state.model, load.state.optimizer))
            optimizer.make()  # before the engine changes anything: from here on nothing is read that could be damaged
        engine.load(model.make, optimizer.make, tag=composition.base.layout.tag)
    finally:
        exchange.close()
    restored = restore_random_state(load.state, load.content)
    for note in load.notes if engine.global_rank == 0 else ():
        LOG.warning("%s: %s", composite.name, note)
    _RESUMED[engine.engine] = composition
    view = TreeView(load.state.model.tree, path=PurePosixPath(load.state.model.path))
    return Resumed(
        run=composite.run,
        step=composite.step,
        global_steps=view["global_steps"].integer(),
        global_samples=view["global_samples"].integer(),
        skipped_steps=view["skipped_steps"].integer(),
        client_state={key: value for key, value in model.make().items() if key not in ENGINE_KEYS},
        layers={layer: choice.step for layer, choice in composite.layers.items()},
        random_state_restored=restored and saved_by == engine.world_size,
        notes=load.notes,
    )


class _Revived:
    """One of the two trees, made into live objects: anew whenever it is asked for, but for the big one."""

    def __init__(self, load: RankLoad, tree: Tree) -> None:
        self._load = load
        self._tree = tree
        self._made: dict[str, Any] | None = None

    def make(self) -> dict[str, Any]:
        """Return the live objects; the memory of their tensors is theirs."""
        if self._made is None:
            made: dict[str, Any] = revive(self._tree, self._fill)
            self._made = made
        return dict(self._made)

    def _fill(self, storage: Storage) -> Any:
        made = empty(storage)
        if storage.elements:
            self._load.fill(storage, bytes_of(made))
        return made


def _check_precision(engine: Engine, load: RankLoad) -> None:
    """Raise where the engine computes in another type than the one that saved: their files have other names."""
    saved, wanted = PurePosixPath(load.state.optimizer.path).name, engine.optimizer_file.name
    if saved.startswith("bf16_") != wanted.startswith("bf16_"):
        raise LayoutMismatch(
            f"the checkpoint was saved {'with' if saved.startswith('bf16_') else 'without'} bf16, the engine trains "
            f"{'with' if wanted.startswith('bf16_') else 'without'} it",
            hint="train in the same precision",
        )
