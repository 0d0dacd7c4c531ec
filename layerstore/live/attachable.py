"""What can be saved and resumed: DeepSpeed's engine, or a module with its optimizers."""

from collections.abc import Iterable
from os import PathLike
from reprlib import repr as short
from typing import TYPE_CHECKING, TypeAlias, cast

from layerstore.errors import InvalidInput
from layerstore.live.levels import Levels, levels_of
from layerstore.store import Store, StrPath

if TYPE_CHECKING:
    from layerstore.live.deepspeed import AttachableEngine, EngineLoad
    from layerstore.live.module import AttachableModule, ModuleLoad

Attachable: TypeAlias = "AttachableEngine | AttachableModule"
"""What is trained, as savers and resumes see it; its `read` is collective, but may raise on one rank alone."""
Loading: TypeAlias = "EngineLoad | ModuleLoad"
"""A composite that was read and checked for one rank, before anything changes."""


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
