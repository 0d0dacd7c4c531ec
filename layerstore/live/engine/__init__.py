"""
DeepSpeed's engine: capture its state, fill it, and let it save and load through a store.

Only ``deepspeed.py`` uses DeepSpeed's names. This room knows no more of savers than the methods that the engine calls.
"""

from layerstore.live.engine.capture import Captured, capture, check_client_state
from layerstore.live.engine.checkpoint_engine import StoreCheckpointEngine, checkpoint_engine_of
from layerstore.live.engine.deepspeed import (
    ENGINE_KEYS,
    FOLDER,
    Engine,
    SavedStates,
    engine_of,
    engines_are_made_with,
)
from layerstore.live.engine.inert import Memory, NotPlain
from layerstore.live.engine.pointer_files import checkpoint
from layerstore.live.engine.randomness import random_state
from layerstore.live.engine.resume import Resumed, check_run, resume
from layerstore.live.engine.savers import check_not_half_loaded, filled_with, note_closed, note_left, place_resumed

__all__ = [
    "ENGINE_KEYS",
    "FOLDER",
    "Captured",
    "Engine",
    "Memory",
    "NotPlain",
    "Resumed",
    "SavedStates",
    "StoreCheckpointEngine",
    "capture",
    "check_client_state",
    "check_not_half_loaded",
    "check_run",
    "checkpoint",
    "checkpoint_engine_of",
    "engine_of",
    "engines_are_made_with",
    "filled_with",
    "note_closed",
    "note_left",
    "place_resumed",
    "random_state",
    "resume",
]
