"""
The saver: saves checkpoints of a running engine to a store while training continues.

The agreement between ranks is in ``live/ranks``, the interface to engines in ``live/engine``.
"""

from layerstore.live.saver.following import Near
from layerstore.live.saver.options import SaverKeywords, SaverOptions, SmallBuffer
from layerstore.live.saver.results import Saved, Status
from layerstore.live.saver.saver import Saver
from layerstore.live.saver.sending import forget_record
