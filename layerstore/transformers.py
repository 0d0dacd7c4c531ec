"""
For Transformers' Trainer: three lines send the Trainer's own saves to a store.

    from layerstore.transformers import LayerstoreCallback, checkpoint

    trainer = Trainer(…, callbacks=[LayerstoreCallback("runs/store", run="sft", policy="parity")])
    trainer.train(resume_from_checkpoint=checkpoint("runs/store", "sft"))
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstore.live import checkpoint
    from layerstore.live.trainer import LayerstoreCallback

__all__ = ["LayerstoreCallback", "checkpoint"]

# Loaded on first use: the callback imports Transformers.
_HOMES = {"LayerstoreCallback": "live.trainer", "checkpoint": "live"}

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"layerstore.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
