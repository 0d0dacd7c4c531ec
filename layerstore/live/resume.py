"""
Resume: a live engine goes on from the store, with no shard written to disk.

The engine's own loader does it, fed from memory: so parameters that stay gathered, half-precision copies and whatever
else hangs on the masters come out right. Which version of each layer that is, a query says.
"""

from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

from layerstore.compose import AdamStep, Composition, RankLoad, compose_latest, plan_load
from layerstore.composite import Composite
from layerstore.errors import Conflict, IntegrityError, InvalidInput, LayoutMismatch, NotFound
from layerstore.history.collected import losses_told
from layerstore.history.place import Place, place_after, place_begun
from layerstore.history.references import Resolved
from layerstore.layers import check_name, parse_reference
from layerstore.live.background import wait_for_saves
from layerstore.live.exchange import Exchange
from layerstore.live.fitting import check_fits, schedule_notes
from layerstore.live.log import LOG
from layerstore.live.randomness import read_random_state, set_random_state
from layerstore.live.revive import bytes_of, empty, revive
from layerstore.live.seams import ENGINE_KEYS, Engine
from layerstore.policy import Policy
from layerstore.storage.runview import RunView
from layerstore.store import Store, StrPath, as_store
from layerstore.tree import Storage, Tree
from layerstore.zero3 import TreeView


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


@dataclass(slots=True)
class _Origin:
    """Where the saves of an engine go on from."""

    filled: Composition | None = None
    """What the engine was filled with."""
    closed: dict[tuple[str, str], Composition] = field(default_factory=dict)
    """The newest commit of savers that were closed since, by store and run."""


_ORIGINS: "WeakKeyDictionary[Any, _Origin]" = WeakKeyDictionary()


def origin_of(engine: Any, store: Store, run: str) -> Composition | None:
    """Return what the next save of *engine* as *run* goes on from, None if it begins from nothing."""
    origin = _ORIGINS.get(engine, _Origin())
    return origin.closed.get((store.id, run), origin.filled)


def filled_with(engine: Any) -> Composition | None:
    """Return what *engine* was last filled with by `resume`, None if it was not."""
    origin = _ORIGINS.get(engine)
    return None if origin is None else origin.filled


def note_closed(engine: Any, store: Store, run: str, *, attempt: int) -> None:
    """Let the next saver of *run* go on with *attempt*, as if the last one had not been closed."""
    view = store.rooms.catalog.find(run)
    rows = [] if view is None else view.of_attempt(attempt)
    if rows:
        tip = Resolved.of_commit(store.rooms.catalog.commit(rows[-1].name))
        _ORIGINS.setdefault(engine, _Origin()).closed[store.id, run] = compose_latest(tip)


def place_resumed(view: RunView | None, composition: Composition | None) -> Place:
    """Return where the saves go that come after an engine was filled from *composition*; None: from no commit."""
    if composition is None:
        return place_begun(view)
    base = composition.base
    record = composition.as_resolved().record
    return place_after(view, record, of_commit=composition.commit, is_as_it_stands=record.layers == base.layers)


def check_run(store: Store, run: str) -> None:
    """
    Make sure that *run* can be a run's name.

    Raises:
        InvalidInput: It is a reference to a step, or no name at all.
        Conflict: It is the name of a pin.
    """
    if not isinstance(run, str):
        raise InvalidInput(f"the run is {run!r}", hint='name it: run="sft"')
    reference = parse_reference(run) if {"@", "~"} & set(run) else None
    if reference is not None:
        step = "" if reference.step is None else f", step={reference.step}"
        raise InvalidInput(
            f"{run!r} is no run but a reference",
            hint=f'run="{reference.name}"{step}; layerstore.transformers.checkpoint takes references',
        )
    check_name(run, what="the run's name")
    if run in store.rooms.records.pin_names() and not store.rooms.records.names(run):
        raise Conflict(
            f"{run!r} is a pin; runs and pins share their names",
            hint="name the run; layerstore.transformers.checkpoint takes a pin",
        )


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
        Conflict: *run* is the name of a pin.
        LayoutMismatch: The layers are not this engine's.
        InvalidInput: Gradients are being accumulated for an update that is still to come.
    """
    known = Engine(engine)
    dropin = known.checkpoint_engine if hasattr(known.checkpoint_engine, "went_to") else None
    if dropin is not None:
        dropin.settle()  # first: what is on its way may be what is asked for
    exchange = Exchange()
    try:
        with exchange.together():
            opened = as_store(store)
            wait_for_saves(opened.id, run)
        with exchange.together():
            composite = _composite(opened, run, step=step, policy=policy, must_exist=must_exist)
        if not exchange.is_same("" if composite is None else composite.commit):
            raise IntegrityError("the ranks resume from different commits", hint="does every host see the same store?")
        if composite is None:
            return None
        resumed = _fill(known, opened, composite, adam_step, exchange)
    finally:
        exchange.close()
    if dropin is not None:
        dropin.went_to(composite.composition)
    return resumed


def _composite(
    store: Store, run: str, *, step: int | Literal["latest"], policy: str | Policy, must_exist: bool
) -> Composite | None:
    check_run(store, run)
    view = store.rooms.catalog.find(run)
    if view is None or not view.rows:
        if must_exist:
            raise NotFound(f"run {run!r} has no commit to resume from", hint=f"runs here: {', '.join(store.runs)}")
        if store.runs:
            LOG.warning("run %r has no commit yet, training begins; runs here: %s", run, ", ".join(store.runs[:10]))
        return None
    return store.compose(run if step == "latest" else f"{run}@{step}", policy=policy)


def _fill(engine: Engine, store: Store, composite: Composite, adam_step: AdamStep, exchange: Exchange) -> Resumed:
    """Fill *engine* from *composite*: all that can fail does so, on every rank, before the engine changes anything."""
    composition = composite.composition
    with exchange.together(), losses_told(store.rooms, composition):
        loaded = Loaded.of(store, composition, rank=engine.rank, world_size=engine.world_size, adam_step=adam_step)
        notes = loaded.fit(engine)
        random_state = read_random_state(loaded.load.state, loaded.load.content)
    engine.load(loaded.model, loaded.optimizer, tag=composition.base.layout.tag)
    restored = random_state is not None and set_random_state(random_state)
    for note in notes if engine.global_rank == 0 else ():
        LOG.warning("%s: %s", composite.name, note)
    _ORIGINS[engine.engine] = _Origin(filled=composition)
    state = loaded.load.state.model
    view = TreeView(state.tree, path=PurePosixPath(state.path))
    return Resumed(
        run=composite.run,
        step=composite.step,
        global_steps=view["global_steps"].integer(),
        global_samples=view["global_samples"].integer(),
        skipped_steps=view["skipped_steps"].integer(),
        client_state={key: value for key, value in loaded.model().items() if key not in ENGINE_KEYS},
        layers={layer: choice.step for layer, choice in composite.layers.items()},
        random_state_restored=restored and composition.base.world_size == engine.world_size,
        notes=notes,
    )


def _age_notes(composition: Composition) -> tuple[str, ...]:
    """Say where layers are older than the commit: what follows is no repetition, and no model that was evaluated."""
    base = composition.base
    older = [entry for entry in composition.layers if not entry.saved_by(base)]
    if not older:
        return ()
    oldest = min(older, key=lambda entry: entry.origin.step)
    return (
        f"{len(older)} of {len(composition.layers)} layers are older than {base.run}@{base.step}, "
        f"the oldest is {oldest.layer} of {oldest.origin.run}@{oldest.origin.step}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One rank's two files of a composite, as live objects that are made when they are asked for."""

    composition: Composition
    load: RankLoad
    _model: "_Revived"
    _optimizer: "_Revived"

    @classmethod
    def of(
        cls,
        store: Store,
        composition: Composition,
        *,
        rank: int,
        world_size: int,
        adam_step: AdamStep = "unify",
    ) -> Self:
        """Plan what *rank* of *world_size* loads."""
        load = plan_load(store.rooms, composition, rank=rank, world_size=world_size, adam_step=adam_step)
        return cls(
            composition=composition,
            load=load,
            _model=_Revived(load, load.state.model.tree),
            _optimizer=_Revived(load, load.state.optimizer.tree),
        )

    def model(self) -> dict[str, Any]:
        """Return what is in ``model_states``."""
        return self._model.make()

    def optimizer(self) -> dict[str, Any]:
        """Return what is in ``optim_states``."""
        return self._optimizer.make()

    def fit(self, engine: Engine, *, is_whole: bool = True) -> tuple[str, ...]:
        """
        Return what does not carry over to *engine*. All that is loaded is read and verified here.

        Not *is_whole*: the optimizer's state is not loaded, and need not fit; the loader compares the weights.

        Raises:
            InvalidInput: Gradients are being accumulated for an update that is still to come.
            LayoutMismatch: It is of another model, another optimizer or another precision.
            IntegrityError: Something of it is damaged.
        """
        if not engine.is_at_boundary:
            raise InvalidInput(
                "gradients are being accumulated for an update that is still to come: they are not the checkpoint's",
                hint="resume after engine.step() at the end of an accumulation, best before training",
            )
        if not is_whole:
            self.model()
            return (*self.load.notes, *_age_notes(self.composition))
        states = engine.states("resumed", {}, exclude_frozen=True)
        self._check_precision(engine.optimizer_file.name)
        check_fits(self.model(), self.optimizer(), states, frozen=engine.frozen_shapes)
        return (*self.load.notes, *_age_notes(self.composition), *schedule_notes(self.model(), states))

    def _check_precision(self, name: str) -> None:
        """Raise where *name*, what the engine calls its optimizer's file, is of another type of computation."""
        saved = PurePosixPath(self.load.state.optimizer.path).name.startswith("bf16_")
        wanted = name.startswith("bf16_")
        if saved != wanted:
            words = {True: "with", False: "without"}
            raise LayoutMismatch(
                f"the checkpoint was saved {words[saved]} bf16, the engine trains {words[wanted]} it",
                hint="train in the same precision",
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
