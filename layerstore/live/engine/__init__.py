"""
What a saver needs from any engine: the interface is in ``engine.py``.

This package turns live objects into inert trees, and trees into live objects. Everything about DeepSpeed is in
``live/deepspeed``.
"""

from layerstore.live.engine.engine import FOLDER, Captured, Engine
from layerstore.live.engine.inert import Memory, NotPlain, check_client_state, inert, place_of
from layerstore.live.engine.randomness import random_state, read_random_state, set_random_state
from layerstore.live.engine.revive import Maker, bytes_of, empty, revive, revive_kept
