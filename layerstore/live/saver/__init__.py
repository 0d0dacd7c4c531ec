"""
The saver: saves checkpoints of a running engine to a store while training continues.

``live/ranks`` has the agreement between ranks, and ``live/engine`` what is needed from an engine.
"""

from layerstore.live.saver.following import Near
from layerstore.live.saver.options import SaverKeywords, SaverOptions, SmallBuffer
from layerstore.live.saver.results import Saved, Status
from layerstore.live.saver.saver import Saver
from layerstore.live.saver.sending import forget_record

__all__ = ["Near", "Saved", "Saver", "SaverKeywords", "SaverOptions", "SmallBuffer", "Status", "forget_record"]
