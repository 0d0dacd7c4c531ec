"""
For the Trainer of Transformers: three lines, and its own saves go to a store.

    from layerstore.transformers import LayerstoreCallback

    trainer = Trainer(…, callbacks=[LayerstoreCallback("runs/store", run="sft", policy="parity")])
    trainer.train(resume_from_checkpoint=True)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstore.live.callback import LayerstoreCallback

__all__ = ["LayerstoreCallback"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from layerstore.live import callback  # brings Transformers along

    return getattr(callback, name)
