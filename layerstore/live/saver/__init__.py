"""
The saver: saves checkpoints of a running engine to a store while training continues.

``live/ranks`` has the agreement between ranks, and ``live/engine`` all knowledge of DeepSpeed.
"""

from layerstore.live.saver.attach import attach, check_push
from layerstore.live.saver.results import Saved, Status
from layerstore.live.saver.saver import Saver
from layerstore.live.saver.settings import SaverSettings, Settings, SmallBuffer

__all__ = ["Saved", "Saver", "SaverSettings", "Settings", "SmallBuffer", "Status", "attach", "check_push"]
