"""
DeepSpeed's engine under ZeRO: capture its state, fill it, and let it save and load through a store.

Only ``engine.py`` uses DeepSpeed's names.
"""

from layerstore.live.deepspeed.capture import Captured, capture, check_client_state
from layerstore.live.deepspeed.checkpoint_engine import StoreCheckpointEngine, checkpoint_engine_of
from layerstore.live.deepspeed.engine import (
    ENGINE_KEYS,
    FOLDER,
    Engine,
    SavedStates,
    engine_of,
    engines_are_made_with,
)
from layerstore.live.deepspeed.load import Loaded
from layerstore.live.deepspeed.pointer_files import checkpoint
from layerstore.live.deepspeed.savers import (
    check_not_half_loaded,
    filled_with,
    note_closed,
    note_left,
    place_resumed,
    wait_for_saves,
)

__all__ = [
    "ENGINE_KEYS",
    "FOLDER",
    "Captured",
    "Engine",
    "Loaded",
    "SavedStates",
    "StoreCheckpointEngine",
    "capture",
    "check_client_state",
    "check_not_half_loaded",
    "checkpoint",
    "checkpoint_engine_of",
    "engine_of",
    "engines_are_made_with",
    "filled_with",
    "note_closed",
    "note_left",
    "place_resumed",
    "wait_for_saves",
]
