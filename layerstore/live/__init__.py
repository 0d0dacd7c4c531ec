"""
Saving and resuming a live engine: this room imports DeepSpeed, Transformers and torch, inside functions.

Users call ``attaching.py`` and ``resuming.py``. ``saver/`` saves while training continues, ``engine/`` defines what a
saver needs from any engine, ``deepspeed/`` and ``module/`` implement it, and ``ranks/`` contains the messages between
ranks. ``trainer.py`` is the callback for Transformers' Trainer; ``trainer_fsdp.py`` is the callback's FSDP2 side.
"""

from layerstore.live.attaching import attach
from layerstore.live.pointer_files import checkpoint
from layerstore.live.resuming import Resumed, resume
from layerstore.live.saver import Saved, Saver, SaverOptions, SmallBuffer, Status
