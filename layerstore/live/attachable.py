"""What a saver is attached to, and a commit is resumed into: DeepSpeed's engine, or a module with its optimizers."""

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
        """What does not carry over."""

    @property
    def random_state(self) -> dict[str, Any] | None:
        """This rank's generators, if it had some."""

    @property
    def client_state(self) -> dict[str, Any]:
        """What the user kept."""

    @property
    def counters(self) -> tuple[int, int, int]:
        """Updates, samples and skipped updates, as the engine counts them."""

    def fill(self) -> None:
        """Give it to this rank's part of what is trained."""


class Attachable(Protocol):
    """What trains."""

    @property
    def engine(self) -> Engine:
        """What a saver reads."""

    @property
    def binding(self) -> Binding:
        """What it is tied to."""

    def meet(self, exchange: Exchange) -> None:
        """Let the ranks learn of each other what a saver must know. Collective."""

    def settle(self) -> None:
        """Wait for all pending saves. Collective."""

    def install(self) -> Callable[[], None]:
        """Take part in its own saves and loads; return a function that undoes it."""

    def read(self, store: Store, composition: Composition, *, adam_step: AdamStep, like: str | None) -> Loading:
        """Read *composition* and check that it fits."""

    def fill(self, fill: Callable[[], None], exchange: Exchange) -> None:
        """Let all ranks *fill* it with what was read. Collective."""

    def warn(self, what: str, *notes: str) -> None:
        """Log *notes* on *what*, on one of all ranks."""


def trained_and_levels(
    where: str, trained: object, optimizers: object, store: Store | StrPath | Iterable[StrPath] | None
) -> tuple[Attachable, Levels]:
    """
    Return what is trained, and where: the last of what was given, since DeepSpeed's engine needs no optimizer.

    Raises:
        InvalidInput: *trained* is nothing that can be saved, or *store* is not a store.
        Unsupported: It keeps state where it cannot be saved.
    """
    if store is None:
        optimizers, store = None, cast("Store | StrPath | list[StrPath]", optimizers)
    if not isinstance(store, Store | str | PathLike | list | tuple):
        raise InvalidInput(
            f"{where}: store is {short(store)}, but must be a store, or the path of one",
            hint=f'{where}(engine, "runs/store", run=…), or {where}(model, optimizer, "runs/store", run=…)',
        )
    return attachable(trained, optimizers), levels_of(store)


def attachable(trained: object, optimizers: object = None) -> Attachable:
    """
    Return what *trained* is: a module if it has *optimizers*, else DeepSpeed's engine.

    Raises:
        InvalidInput: It is neither.
        Unsupported: It keeps state where it cannot be saved.
    """
    if optimizers is not None:
        from layerstore.live.module import AttachableModule

        return AttachableModule(trained, optimizers)
    from layerstore.live.deepspeed import AttachableEngine

    if not hasattr(trained, "zero_optimization_stage") and hasattr(trained, "named_parameters"):
        raise InvalidInput(
            f"{type(trained).__name__} is a module, and its optimizer is not named",
            hint="attach(model, optimizer, store, run=…), and resume likewise; or pass DeepSpeed's engine",
        )
    return AttachableEngine(trained)
