"""How a saver saves: what a user chooses once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from layerstore.ops.timings import SaveTiming
from layerstore.policy.keep import Keep

Mode = Literal["async", "sync"]
Pressure = Literal["wait", "skip", "degrade"]
Frozen = Literal["once", "exclude"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``layerstore.attach``, which says what they mean."""

    mode: Mode
    host_buffer: int | str
    on_pressure: Pressure
    frozen: Frozen
    layer_pattern: str | None
    keep: Keep | None
    on_saved: Callable[[SaveTiming], None] | None
