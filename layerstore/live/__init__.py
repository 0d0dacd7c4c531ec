"""
Saving and resuming a live engine: importing this room imports no DeepSpeed, Transformers or torch; its functions do.

Users call ``attaching.py`` and ``resuming.py``. ``saver/`` saves while training continues, ``engine/`` defines what a
saver needs from any engine, ``deepspeed/`` and ``module/`` implement it, and ``ranks/`` contains the messages between
ranks. ``trainer.py`` is the callback for Transformers' Trainer; ``trainer_fsdp.py`` is the callback's FSDP2 side.
"""

from layerstore.live.attaching import attach
from layerstore.live.pointer_files import checkpoint
from layerstore.live.resuming import Resumed, resume
from layerstore.live.saver import Saved, Saver, SaverOptions, SmallBuffer, Status
