"""
The saver: checkpoints of a running engine go into a store while training goes on.

What the ranks agree on is in ``live/ranks``, and what is known of DeepSpeed in ``live/engine``.
"""

from layerstore.live.saver.attach import attach
from layerstore.live.saver.results import Saved, Status
from layerstore.live.saver.saver import Saver
from layerstore.live.saver.settings import SmallBuffer

__all__ = ["Saved", "Saver", "SmallBuffer", "Status", "attach"]
