"""
Live objects as inert trees, and trees as live objects again, for the engines of every trainer.

What only DeepSpeed has is in ``live/deepspeed``.
"""

from layerstore.live.engine.inert import Memory, NotPlain, inert
from layerstore.live.engine.randomness import random_state, read_random_state, set_random_state
from layerstore.live.engine.revive import bytes_of, empty, revive

__all__ = [
    "Memory",
    "NotPlain",
    "bytes_of",
    "empty",
    "inert",
    "random_state",
    "read_random_state",
    "revive",
    "set_random_state",
]
