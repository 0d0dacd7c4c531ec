"""
DeepSpeed's engine under ZeRO: capture its state, fill it from a store, and make it save and load through a store.

Only ``engine.py`` uses the engine's own attributes; ``load.py`` imports the few DeepSpeed classes that states contain.
"""

from layerstore.live.deepspeed.attachable import AttachableEngine, EngineLoad
from layerstore.live.deepspeed.checkpoint_engine import StoreCheckpointEngine
from layerstore.live.deepspeed.engine import engine_of, engines_are_made_with
