"""
The saver: saves checkpoints of a running engine to a store while training continues.

``live/ranks`` has the agreement between ranks, and ``live/deepspeed`` all knowledge of DeepSpeed.
"""

from layerstore.live.saver.options import Durable, Frozen, Mode, Pressure, SaverSettings, Settings, SmallBuffer
from layerstore.live.saver.results import Saved, Status
from layerstore.live.saver.saver import Saver

__all__ = [
    "Durable",
    "Frozen",
    "Mode",
    "Pressure",
    "Saved",
    "Saver",
    "SaverSettings",
    "Settings",
    "SmallBuffer",
    "Status",
]
