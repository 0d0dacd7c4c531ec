"""The settings of ``layerstore.attach``, and the size of the host buffer that follows from them."""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from layerstore.errors import InvalidInput
from layerstore.layers import compile_pattern
from layerstore.limits import MIB
from layerstore.live.deepspeed import Engine
from layerstore.policy import Keep, Policy
from layerstore.publish import SaveTiming
from layerstore.units import size_in_bytes

Mode = Literal["async", "sync"]
Pressure = Literal["wait", "skip", "degrade"]
Frozen = Literal["once", "exclude"]
Durable = Literal["local", "remote"]

# Padding between slices, and what is lost where the ring wraps around.
_SLACK_BYTES = 16 * MIB
_BUFFER_BYTES_MIN = 1_000_000


class SmallBuffer(UserWarning):
    """The host has less free memory than one save needs: training may wait for the disk."""


class SaverSettings(TypedDict, total=False):
    """What ``layerstore.attach`` takes besides an engine, a store and a run, for those who pass it on."""

    policy: str | Policy
    mode: Mode
    host_buffer: int | str
    on_pressure: Pressure
    keep: Keep | None
    push: str | None
    durable: Durable
    frozen: Frozen
    layer_pattern: str | None
    on_saved: Callable[[SaveTiming], None] | None
    on_failed: Callable[[SaveTiming], None] | None
    create: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of ``layerstore.attach``, which documents them."""

    mode: Mode
    host_buffer: int | str
    on_pressure: Pressure
    frozen: Frozen
    layer_pattern: str | None
    keep: Keep | None
    push: str | None
    durable: Durable
    on_saved: Callable[[SaveTiming], None] | None
    on_failed: Callable[[SaveTiming], None] | None
    create: bool

    def __post_init__(self) -> None:
        for name, kind in (("mode", Mode), ("on_pressure", Pressure), ("frozen", Frozen), ("durable", Durable)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise InvalidInput(f"{name} is {getattr(self, name)!r}", hint=f"choose one of: {choices}")
        compile_pattern(self.layer_pattern)
        _buffer_bytes(self.host_buffer)
        if self.durable == "remote" and self.push is None:
            raise InvalidInput('durable is "remote", but there is no push', hint='push="s3://BUCKET/PREFIX" names one')

    @property
    def of_all_ranks(self) -> str:
        """The settings that must be the same on all ranks."""
        names = ("mode", "on_pressure", "frozen", "push", "durable")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


def _buffer_bytes(wanted: int | str) -> int | None:
    """Return the size of a host buffer that is *wanted*, None for ``auto``; raises InvalidInput if it is no size."""
    if wanted == "auto":
        return None
    size = size_in_bytes(wanted)
    if size < _BUFFER_BYTES_MIN:
        raise InvalidInput(f"host_buffer is {wanted}: at least 1 MB is needed", hint='say "auto", or "4GB"')
    return size


def pool_bytes(engine: Engine, wanted: int | str) -> int:
    """Return the size of one rank's host buffer; for ``auto`` its largest save, capped by the free memory."""
    size = _buffer_bytes(wanted)
    if size is not None:
        return size
    needed = engine.state_bytes + _SLACK_BYTES
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = max(available // 2 // engine.ranks_here, _SLACK_BYTES)
    if needed > room:
        warnings.warn(
            f"one save needs {needed / 1e9:.1f} GB of this host's memory, {room / 1e9:.1f} GB are used: "
            "training waits for the disk where a save is larger",
            SmallBuffer,
            stacklevel=3,
        )
    return min(needed, room)
