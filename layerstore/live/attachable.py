"""The interface of everything that can be saved and resumed: DeepSpeed's engine, or a module with its optimizers."""

from collections.abc import Callable, Iterable
from os import PathLike
from reprlib import repr as short
from typing import Any, Protocol, cast

from layerstore.compose import Composition
from layerstore.errors import InvalidInput
from layerstore.live.binding import Binding
from layerstore.live.engine import Engine
from layerstore.live.levels import Levels, levels_of
from layerstore.live.ranks import Exchange
from layerstore.rank_options import AdamStep
from layerstore.store import Store, StrPath


class Loading(Protocol):
    """A composite that was read and checked for one rank, before anything changes."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on each thing that does not carry over."""

    @property
    def random_state(self) -> dict[str, Any] | None:
        """The state of this rank's random number generators; None if none was saved."""

    @property
    def client_state(self) -> dict[str, Any]:
        """The user's client_state."""

    @property
    def counters(self) -> tuple[int, int, int]:
        """Updates, samples and skipped updates, as the engine counts them."""

    def fill(self) -> None:
        """Load the composite into this rank's part of the engine or module."""


class Attachable(Protocol):
    """An engine, or a module with its optimizers, that a saver can be attached to."""

    @property
    def engine(self) -> Engine:
        """The interface that a saver reads."""

    @property
    def binding(self) -> Binding:
        """The attached saver, and the commit that the engine holds."""

    def meet(self, exchange: Exchange) -> None:
        """Exchange which rank holds what, if a saver needs to know. Collective."""

    def settle(self) -> None:
        """Wait for all pending saves. Collective."""

    def install(self) -> Callable[[], None]:
        """Make the engine's own saves and loads use the store; return a function that undoes this."""

    def read(
        self, exchange: Exchange, store: Store, composition: Composition, *, adam_step: AdamStep, like: str | None
    ) -> Loading:
        """Read *composition* and check that it fits. Collective, but may raise on one rank alone."""

    def fill(self, fill: Callable[[], None], exchange: Exchange) -> None:
        """Call *fill* on all ranks. Collective."""

    def warn(self, what: str, *notes: str) -> None:
        """Log *notes* about *what*, on one rank only."""


def trained_and_levels(
    where: str, trained: object, optimizers: object, store: Store | StrPath | Iterable[StrPath] | None
) -> tuple[Attachable, Levels]:
    """
    Return *trained* as an `Attachable`, and the levels of *store*; if *store* is None, *optimizers* is the store.

    Raises:
        InvalidInput: *trained* cannot be saved, or *store* is not a store.
        Unsupported: *trained* keeps state where it cannot be saved.
    """
    hint = f'{where}(engine, "runs/store", run=…), or {where}(model, optimizer, "runs/store", run=…)'
    if store is None:
        named = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        if any(entry is None or hasattr(entry, "param_groups") for entry in named):
            raise InvalidInput(f"{where}: no store was given", hint=hint)
        optimizers, store = None, cast("Store | StrPath | list[StrPath]", optimizers)
    if not isinstance(store, Store | str | PathLike | list | tuple):
        raise InvalidInput(f"{where}: store is {short(store)}, but must be a store, or the path of one", hint=hint)
    return attachable(trained, optimizers), levels_of(store)


def attachable(trained: object, optimizers: object = None) -> Attachable:
    """
    Return *trained* as a module with its *optimizers* or, without any, as DeepSpeed's engine.

    Raises:
        InvalidInput: *trained* is neither.
        Unsupported: *trained* keeps state where it cannot be saved.
    """
    if optimizers is not None:
        from layerstore.live.module import AttachableModule

        return AttachableModule(trained, optimizers)
    from layerstore.live.deepspeed import AttachableEngine

    if not hasattr(trained, "zero_optimization_stage") and hasattr(trained, "named_parameters"):
        raise InvalidInput(
            f"{type(trained).__name__} is a module, and no optimizer was given",
            hint="attach(model, optimizer, store, run=…), and resume in the same way; or pass DeepSpeed's engine",
        )
    return AttachableEngine(trained)
