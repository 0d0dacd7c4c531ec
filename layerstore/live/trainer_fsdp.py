"""
Saves and loads of Transformers' Trainer under FSDP2; only this module uses internals of the Trainer and Accelerate.

The Trainer's module imports four functions of Accelerate; they are replaced in that module. If a saver is attached to
the model, a save goes to the store and leaves pointers. A load that finds pointers reads their target from the store.
Accelerate does all other saves and loads.
"""

import functools
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from layerstore.compose import Composition, naming_damage
from layerstore.filenames import FSDP_MODEL
from layerstore.live.binding import binding_of, wait_for_saves
from layerstore.live.module import AttachableModule
from layerstore.live.pointer_files import check_same, composition_of, pointer_to_next, store_of, write_fsdp_pointers
from layerstore.live.ranks import Exchange
from layerstore.live.saver import Saver
from layerstore.store import Store
from layerstore.zero3 import Pointer, read_pointer

_TAG = FSDP_MODEL.removesuffix(".bin")


def trains_with_fsdp() -> bool:
    """Whether the Trainer that made this process's Accelerator trains under FSDP, version 1 or 2."""
    return bool(AcceleratorState().distributed_type == DistributedType.FSDP)


def trainers_save_to_stores() -> None:
    """Make every Trainer of this process use stores from now on; the Trainer's arguments have no setting for that."""
    from transformers import trainer

    for name, instead in (
        ("save_fsdp_model", _save),
        ("save_fsdp_optimizer", _save_nothing_more),
        ("load_fsdp_model", _load_model),
        ("load_fsdp_optimizer", _load_optimizer),
    ):
        real = getattr(trainer, name, None)
        if real is not None and not hasattr(real, "layerstore"):
            setattr(trainer, name, _replaced(real, instead))


def _replaced(real: Callable[..., Any], instead: "_Instead") -> Callable[..., Any]:
    @functools.wraps(real)
    def replaced(plugin: Any, accelerator: Any, *others: Any, **named: Any) -> Any:
        accelerates = functools.partial(real, plugin, accelerator, *others, **named)
        model, folder = others[-2:]  # last in all four functions; for optimizers, one more argument precedes
        return instead(accelerates, accelerator, model, Path(folder)) if accelerator.is_fsdp2 else accelerates()

    replaced.layerstore = True  # type: ignore[attr-defined]
    return replaced


# -- replacements ----------------------------------------------------------------------------------------------------

_Real = Callable[[], Any]
"""Calls Accelerate's own function."""

_Instead = Callable[[_Real, Any, Any, Path], Any]


def _save(real: _Real, accelerator: Any, model: Any, folder: Path) -> Any:
    """Save model and optimizer to the store, and write pointers to both."""
    saver = binding_of(model).saver
    if saver is None:
        return real()
    pointer = pointer_to_next(saver)
    saver.take(None, client_state={}, folder=folder, tag=_TAG)
    with saver.exchange.raise_on_all():
        if accelerator.is_local_main_process:
            write_fsdp_pointers(saver.store.repo.files, folder, pointer)
    return None


def _save_nothing_more(real: _Real, accelerator: Any, model: Any, folder: Path) -> Any:
    """Do nothing if a saver is attached, which has saved the optimizer with the model."""
    del accelerator, folder
    return real() if binding_of(model).saver is None else None


def _load_model(real: _Real, accelerator: Any, model: Any, folder: Path) -> Any:
    """Load the weights, to resume or to restore the best model at the end of training."""
    from torch.nn.modules.module import _IncompatibleKeys

    return _filled(real, accelerator, model, folder, optimizer=False) or _IncompatibleKeys([], [])


def _load_optimizer(real: _Real, accelerator: Any, model: Any, folder: Path) -> Any:
    """Load the state of the optimizer; the Trainer loads it after the weights."""
    return _filled(real, accelerator, model, folder, optimizer=True)


# -- loading ---------------------------------------------------------------------------------------------------------


def _filled(real: _Real, accelerator: Any, model: Any, folder: Path, *, optimizer: bool) -> Any:
    """Fill the model, or the optimizer if *optimizer*, from the store; without pointers in *folder*, use Accelerate."""
    trained = AttachableModule(model, accelerator._optimizers)
    saver = trained.binding.saver
    if saver is not None:
        saver.close()  # training has ended or was given up: the loaded state does not continue what was saved
    with closing(Exchange()) as exchange:
        target = _find_target(exchange, folder, saver)
        if target is not None:
            pointer, store, composition = target
            with exchange.raise_on_all(), naming_damage(store.repo, composition):
                loading = trained.read_part(store, composition, optimizer=optimizer)
            trained.fill(loading.fill, exchange)
    if target is None:
        trained.binding.begin_load()
        return real()
    trained.warn(pointer.name, *(loading.notes if optimizer else ()))
    return None


def _find_target(exchange: Exchange, folder: Path, saver: Saver | None) -> tuple[Pointer, Store, Composition] | None:
    """Return the target of the pointers in *folder*, the same on all ranks; None if *folder* has no pointers."""
    with exchange.raise_on_all():
        pointer = read_pointer(folder / FSDP_MODEL)
        if pointer is not None:
            wait_for_saves(pointer.store_id, pointer.run)
    with exchange.raise_on_all():
        store = None if pointer is None else store_of(pointer, saver)
        target = None if pointer is None or store is None else (pointer, store, composition_of(store, pointer))
    check_same(exchange, folder, "no pointer" if target is None else f"a pointer to {target[2].commit}")
    return target
