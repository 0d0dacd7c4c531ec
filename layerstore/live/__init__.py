"""
Saving and resuming a live engine: this room imports DeepSpeed, Transformers and torch, inside functions.

``saver/`` saves while training continues, ``engine/`` knows DeepSpeed, and ``ranks/`` holds the messages between ranks.
``trainer.py`` is the callback for Transformers' Trainer, and ``saved_names.py`` asks Transformers how it names weights.
"""

from layerstore.live.engine import Resumed, checkpoint, resume
from layerstore.live.saver import Saved, Saver, SmallBuffer, Status, attach

__all__ = ["Resumed", "Saved", "Saver", "SmallBuffer", "Status", "attach", "checkpoint", "resume"]
