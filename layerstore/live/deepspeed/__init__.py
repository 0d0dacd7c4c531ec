"""
DeepSpeed's engine under ZeRO: capture its state, fill it, and let it save and load through a store.

Only ``engine.py`` uses DeepSpeed's names.
"""

from layerstore.live.deepspeed.checkpoint_engine import StoreCheckpointEngine, checkpoint_engine_of
from layerstore.live.deepspeed.engine import ENGINE_KEYS, ZeroEngine, engine_of, engines_are_made_with
from layerstore.live.deepspeed.load import Loaded
from layerstore.live.deepspeed.pointer_files import checkpoint

__all__ = [
    "ENGINE_KEYS",
    "Loaded",
    "StoreCheckpointEngine",
    "ZeroEngine",
    "checkpoint",
    "checkpoint_engine_of",
    "engine_of",
    "engines_are_made_with",
]
