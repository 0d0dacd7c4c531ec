"""
Saving and resuming a live engine: the only room that imports DeepSpeed and Transformers, inside functions; and torch.

``saver/`` saves while training continues, ``engine/`` knows DeepSpeed, and ``ranks/`` holds the messages between ranks.
``trainer.py`` is the callback for Transformers' Trainer, ``saved_names.py`` asks Transformers how it names weights, and
``demo/`` is ``layerstore demo``.
"""

from layerstore.live.engine import Resumed, checkpoint, resume
from layerstore.live.saver import Saved, Saver, SmallBuffer, Status, attach

__all__ = ["Resumed", "Saved", "Saver", "SmallBuffer", "Status", "attach", "checkpoint", "resume"]
