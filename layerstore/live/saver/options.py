"""A saver's options, and the size of the host buffer that follows from them."""

import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Literal, TypedDict, get_args

from layerstore.errors import InvalidInput
from layerstore.layers import compile_pattern, is_name
from layerstore.layout import place
from layerstore.limits import MIB
from layerstore.live.engine import Engine
from layerstore.policy import Keep, Policy, chosen_policy
from layerstore.precision import EXACT_EVERY, PrecisionName, keyframes
from layerstore.publish import SaveTiming
from layerstore.units import size_in_bytes

Mode = Literal["async", "sync"]
Pressure = Literal["wait", "skip", "degrade"]
Frozen = Literal["once", "exclude"]
Durable = Literal["local", "remote"]

# For padding between slices, and for the gap where the ring wraps around.
_SLACK_BYTES = 16 * MIB
_BUFFER_BYTES_MIN = 1_000_000


class SmallBuffer(UserWarning):
    """The host buffer is smaller than one save, as too little memory is free: training may wait for the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverOptions:
    """The options of ``layerstore.attach``, and of the Trainer's callback, which take them by name."""

    policy: str | Policy = "latest"
    """Which layers are due at each save; see docs/guides/policies.md."""
    precision: PrecisionName = "exact"
    """The precision of layers between exact saves: ``exact``, ``moments8``, ``delta8`` or ``delta4``."""
    exact_every: int | None = EXACT_EVERY
    """Every Nth version of a layer is exact; with None, only the first."""
    mode: Mode = "async"
    """``async``; with ``sync``, every ``save`` waits until the save is durable."""
    host_buffer: int | str = "auto"
    """The size of each rank's host buffer for copies, in bytes or as ``"8GB"``."""
    on_pressure: Pressure = "wait"
    """
    What to do when the disk does not keep up: ``wait`` for it, ``skip`` a save, or ``degrade`` it to as many layers as
    fit.
    """
    keep: Keep | None = None
    """Which commits of the run to keep: after each save, the others are collected in the background."""
    push: str | PathLike[str] | Iterable[str | PathLike[str]] | None = None
    """
    A remote's name or URL, or a folder: after each save, the run is sent to it in the background, and *keep* removes
    only commits that have arrived. If this is a list of destinations, nearest first, *keep* trims all but the last;
    each loses only commits that the next one has.
    """
    durable: Durable = "local"
    """
    With ``remote``, a save counts as safe only once it is pushed; ``wait`` and ``sync`` saves return only then.
    """
    frozen: Frozen = "once"
    """``once`` writes frozen weights once; ``exclude`` leaves them out."""
    layer_pattern: str | None = None
    """A regular expression that finds the layer in a parameter's name, if the built-in rule does not."""
    on_saved: Callable[[SaveTiming], None] | None = None
    """Called on rank 0, in its training thread, with the timing of each save that became a commit."""
    on_failed: Callable[[SaveTiming], None] | None = None
    """Called in the same way with the timing of each save that failed, which includes the reason."""
    create: bool = True
    """Whether to make a store if the path has none."""

    def __post_init__(self) -> None:
        # Everything is checked now: the first save may be hours away.
        for name, kind in (("mode", Mode), ("on_pressure", Pressure), ("frozen", Frozen), ("durable", Durable)):
            if getattr(self, name) not in get_args(kind):
                choices = ", ".join(map(repr, get_args(kind)))
                raise InvalidInput(
                    f"the option {name} cannot be {getattr(self, name)!r}", hint=f"choose one of: {choices}"
                )
        chosen_policy(self.policy)
        keyframes(self.precision, self.exact_every)
        compile_pattern(self.layer_pattern)
        _buffer_bytes(self.host_buffer)
        if self.durable == "remote" and not self.places:
            raise InvalidInput(
                'durable is "remote", but push is not set',
                hint='set push="s3://BUCKET/PREFIX"; leave durable out if the store is itself in a bucket',
            )

    @property
    def places(self) -> tuple[str, ...]:
        """The destinations that each save is sent to: remotes by name or URL, folders by absolute path."""
        named = [self.push] if isinstance(self.push, str | PathLike) else list(self.push or ())
        return tuple(level if isinstance(level, str) and is_name(level) else place(level) for level in named)

    @property
    def excludes_frozen(self) -> bool:
        """Whether frozen weights are left out."""
        return self.frozen == "exclude"

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """The compiled *layer_pattern*; None for the built-in rule."""
        return compile_pattern(self.layer_pattern)


class SaverKeywords(TypedDict, total=False):
    """`SaverOptions` by name, for type checkers, which cannot read the names from a dataclass."""

    policy: str | Policy
    precision: PrecisionName
    exact_every: int | None
    mode: Mode
    host_buffer: int | str
    on_pressure: Pressure
    keep: Keep | None
    push: str | PathLike[str] | Iterable[str | PathLike[str]] | None
    durable: Durable
    frozen: Frozen
    layer_pattern: str | None
    on_saved: Callable[[SaveTiming], None] | None
    on_failed: Callable[[SaveTiming], None] | None
    create: bool


def _buffer_bytes(wanted: int | str) -> int | None:
    """Return the bytes of the host buffer *wanted*, None for ``auto``; raises InvalidInput if it is not a size."""
    if wanted == "auto":
        return None
    size = size_in_bytes(wanted)
    if size < _BUFFER_BYTES_MIN:
        raise InvalidInput(f"host_buffer is {wanted}: at least 1 MB is needed", hint='write "auto", or "4GB"')
    return size


def pool_bytes(engine: Engine, wanted: int | str) -> int:
    """
    Return the size of a rank's host buffer.

    For ``auto``, it is as large as the largest save, but at most the rank's share of half of the free memory.
    """
    size = _buffer_bytes(wanted)
    if size is not None:
        return size
    needed = engine.state_bytes + _SLACK_BYTES
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    ranks_here = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    room = max(available // 2 // ranks_here, _SLACK_BYTES)
    if needed > room:
        warnings.warn(
            f"a save may need {needed / 1e9:.1f} GB of host memory, but the buffer gets {room / 1e9:.1f} GB: "
            "training then waits for the disk; host_buffer= sets its size",
            SmallBuffer,
            stacklevel=3,
        )
    return min(needed, room)
