"""A module with its optimizers as an `Attachable`."""

from collections.abc import Callable

from layerstore.compose import Composition
from layerstore.errors import InvalidInput
from layerstore.live.binding import Binding
from layerstore.live.log import LOG
from layerstore.live.module.engine import ModuleEngine
from layerstore.live.module.load import ModuleLoad
from layerstore.live.ranks import Exchange
from layerstore.rank_options import AdamStep
from layerstore.store import Store


class AttachableModule:
    """A module and its optimizers."""

    def __init__(self, model: object, optimizers: object) -> None:
        self.engine = ModuleEngine(model, optimizers)

    @property
    def binding(self) -> Binding:
        """The attached saver, and the commit that the module holds."""
        return self.engine.binding

    def meet(self, exchange: Exchange) -> None:
        """Let all ranks know which rank holds which part of each tensor. Collective."""
        self.engine.meet(exchange.integers, exchange.is_same)

    def settle(self) -> None:
        """Wait for all pending saves. Collective."""
        if self.binding.saver is not None:
            self.binding.saver.wait()

    def install(self) -> Callable[[], None]:
        """Do nothing, since a module makes no saves of its own; return a function that does nothing."""
        return lambda: None

    def read(
        self, exchange: Exchange, store: Store, composition: Composition, *, adam_step: AdamStep, like: str | None
    ) -> ModuleLoad:
        """Read *composition* and check that it fits."""
        del exchange  # on a different mesh, a rank may need any slice, so each rank reads all versions itself
        if like is not None:
            raise InvalidInput("like= is for DeepSpeed's engine: a module needs none of DeepSpeed's own state")
        return ModuleLoad(self.engine, store, composition, adam_step=adam_step)

    def read_part(self, store: Store, composition: Composition, *, optimizer: bool) -> ModuleLoad:
        """Read the weights of *composition* or, if *optimizer*, the optimizer's state instead; check that they fit."""
        return ModuleLoad(
            self.engine, store, composition, adam_step="unify", weights=not optimizer, optimizer=optimizer
        )

    def fill(self, fill: Callable[[], None], exchange: Exchange) -> None:
        """Call *fill* on all ranks; if *fill* fails on one rank, no rank saves the half-filled module. Collective."""
        try:
            with exchange.raise_on_all():
                fill()
        except BaseException:
            self.binding.fail_load()
            raise
        saver, held = self.binding.saver, self.binding.composition
        if held is not None and self.engine.rank == 0:
            LOG.info("loaded %s@%d from %s", held.base.run, held.base.step, self.binding.place)
        if saver is not None:
            saver.rebase_on(self.binding.composition_in(saver.store))

    def warn(self, what: str, *notes: str) -> None:
        """Log *notes* about *what*, on one rank only."""
        for note in notes if self.engine.rank == 0 else ():
            LOG.warning("%s: %s", what, note)
