"""How much of the host's memory copies may take."""

import os
import warnings

from layerstore.errors import InvalidInput
from layerstore.limits import MIB
from layerstore.live.seams import Engine
from layerstore.units import size_in_bytes

# Padding between slices, and room for the ring's seam.
_SLACK_BYTES = 16 * MIB


_BYTES_MIN = 1_000_000


class SmallBuffer(UserWarning):
    """The host has less memory free than one save needs: training may wait for the disk."""


def pool_bytes(engine: Engine, wanted: int | str) -> int:
    """
    Return the size of one rank's pool: for ``auto`` all that it may have to save at once, as far as that is free.

    Raises:
        InvalidInput: *wanted* is no size.
    """
    if wanted != "auto":
        size = size_in_bytes(wanted)
        if size < _BYTES_MIN:
            raise InvalidInput(f"host_buffer is {wanted}: at least 1 MB is needed", hint='say "auto", or "4GB"')
        return size
    needed = engine.state_bytes + _SLACK_BYTES
    room = max(_available_bytes() // 2 // engine.ranks_here, _SLACK_BYTES)
    if needed > room:
        warnings.warn(
            f"one save needs {needed / 1e9:.1f} GB of this host's memory, {room / 1e9:.1f} GB are used: "
            "training waits for the disk where a save is larger",
            SmallBuffer,
            stacklevel=3,
        )
    return min(needed, room)


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
