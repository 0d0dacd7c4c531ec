"""
The optimizer's update counts: read from a checkpoint's trees, and written like those that are there.
"""

import math
from struct import Struct

from layerstore.errors import LayoutMismatch
from layerstore.hashing import crc32
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.source import damaged, open_source
from layerstore.tree import Located, Tensor, Tree, with_content

STEP = "step"
"""The optimizer's update count, one per sub-group: an int in DeepSpeed's optimizers, a scalar tensor in torch's."""
_COUNTERS = {"F32": Struct("<f"), "F64": Struct("<d"), "I64": Struct("<q"), "I32": Struct("<i")}
"""The element types of such a tensor."""


def count_of(counter: Tree) -> int | None:
    """Return a step counter as a number; None if it is not a counter."""
    number = number_of(counter)
    return int(number) if number is not None and math.isfinite(number) else None


def number_of(counter: Tree) -> float | None:
    """Return a number, or a tensor that is one; None if it is neither."""
    if not (isinstance(counter, Tensor) and counter.elements == 1 and counter.storage.dtype in _COUNTERS):
        return counter if isinstance(counter, int) and not isinstance(counter, bool) else None
    content, layout = counter.storage.content, _COUNTERS[counter.storage.dtype]
    start = counter.offset * layout.size
    if isinstance(content, bytes):
        data = content[start : start + layout.size]
    else:
        assert isinstance(content, Located), "trees that were just read point into their files"
        with open_source(content.path) as file:
            # Ranks compare this number before payloads are verified: bit rot must not look like a mixed checkpoint.
            if content.size_bytes <= INLINE_BYTES_MAX:
                stored = file.read_at(content.offset_bytes, content.size_bytes)
                if crc32(stored) != content.crc32:
                    raise damaged(content.path, "a step counter has another checksum than its file states")
            data = file.read_at(content.offset_bytes + start, layout.size)
    value: float = layout.unpack(data)[0]
    return value


def counter_like(old: Tree, count: int) -> Tree:
    """Return a step counter like *old* with the value *count*; raises LayoutMismatch if *old* is not a counter."""
    if isinstance(old, Tensor) and old.elements == 1 and old.storage.dtype in _COUNTERS:
        return with_content(old, _COUNTERS[old.storage.dtype].pack(count))
    if isinstance(old, int) and not isinstance(old, bool):
        return count
    raise LayoutMismatch(
        f"the base's optimizer counts its steps in a {type(old).__name__}, which cannot be set",
        hint="compose with --adam-step unify",
    )
