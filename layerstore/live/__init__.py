"""
Saving and resuming a live engine: this room imports DeepSpeed, Transformers and torch, inside functions.

``attaching.py`` and ``resuming.py`` have what users call. ``saver/`` saves while training continues, ``deepspeed/``
knows DeepSpeed, ``engine/`` says what a saver needs from any engine, and ``ranks/`` holds the messages between ranks.
``trainer.py`` is the callback for Transformers' Trainer, and ``trainer_fsdp.py`` what it does under FSDP2.
"""

from layerstore.live.attaching import attach
from layerstore.live.pointer_files import checkpoint
from layerstore.live.resuming import Resumed, resume
from layerstore.live.saver import Saved, Saver, SaverOptions, SmallBuffer, Status

__all__ = ["Resumed", "Saved", "Saver", "SaverOptions", "SmallBuffer", "Status", "attach", "checkpoint", "resume"]
