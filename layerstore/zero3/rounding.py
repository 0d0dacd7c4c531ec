"""
Half-precision weights from their fp32 master: round to nearest, ties to even, as the engine does.
For exports, from any other floating point too, and fp32 from half precision.

NaNs are not promised to round alike everywhere: whoever relies on a derivation checks it bit for bit first.
numpy is imported when the first element is rounded: most commands never do.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def can_derive(master: str, weights: str) -> bool:
    """Whether weights of the type *weights* can be rounded from a master of the type *master*."""
    return master == weights or (master, weights) in _ROUNDINGS


def round_master(data: bytes | bytearray | memoryview, *, master: str, weights: str) -> memoryview:
    """Return the *weights*-typed bytes of the *master*-typed bytes *data*."""
    if master == weights:
        return memoryview(data).cast("B")
    import numpy as np

    rounded = _ROUNDINGS[master, weights](np.frombuffer(data, dtype="<u4"))
    return rounded.data.cast("B")


def equal_bytes(left: memoryview, right: memoryview) -> bool:
    """Whether both hold the same bytes; Python's own comparison looks at one byte at a time."""
    import numpy as np

    return np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8))


def can_convert(source: str, target: str) -> bool:
    """Whether `convert` knows the way from the type *source* to the type *target*."""
    return source == target or (source in _INFINITIES and can_derive("F32", target))


def convert(data: bytes | bytearray | memoryview, *, source: str, target: str) -> memoryview:
    """
    Return the *source*-typed elements of *data* as *target*: widened, or rounded to nearest, ties to even.

    As in torch, what is not fp32 becomes that first.
    """
    if source == target:
        return memoryview(data).cast("B")
    if source != "F32":
        data = _to_float32(data, source)
    return round_master(data, master="F32", weights=target)


def newly_infinite(data: bytes, converted: memoryview, *, source: str, target: str) -> int:
    """Count the finite elements of *data* that became infinite in *converted*."""
    found = _infinities(converted, target)
    return found - _infinities(data, source) if found else 0


def _infinities(data: bytes | memoryview, dtype: str) -> int:
    import numpy as np

    kind, infinity = _INFINITIES[dtype]
    words = np.frombuffer(data, kind)
    # Doubled, the sign is gone.
    return int(np.count_nonzero(words + words == words.dtype.type(2 * infinity)))


def _to_float32(data: bytes | bytearray | memoryview, source: str) -> memoryview:
    import numpy as np

    if source == "BF16":
        words = np.frombuffer(data, "<u2").astype("<u4")
        words <<= np.uint32(16)
        return words.data.cast("B")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.frombuffer(data, {"F16": "<f2", "F64": "<f8"}[source]).astype("<f4").data.cast("B")


def _to_bfloat16(words: "npt.NDArray[np.uint32]") -> "npt.NDArray[Any]":
    import numpy as np

    # Add just under half of the last kept bit, plus that bit itself: ties go to even, and a carry
    # into the exponent is what rounding up to the next power of two, or to infinity, means.
    odd = words >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += words
    # Little-endian: the upper half of each word is every second element.
    rounded = odd.view("<u2")[1::2].copy()
    # Not by comparing the masked bits: two more arrays of this size cost more than all the rest.
    is_nan = np.isnan(words.view("<f4"))
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded


def _to_float16(words: "npt.NDArray[np.uint32]") -> "npt.NDArray[Any]":
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # to infinity, as the engine does
        return words.view("<f4").astype("<f2")


_ROUNDINGS: dict[tuple[str, str], Callable[["npt.NDArray[np.uint32]"], "npt.NDArray[Any]"]] = {
    ("F32", "BF16"): _to_bfloat16,
    ("F32", "F16"): _to_float16,
}

# Words of each type's size, and what infinity is in them.
_INFINITIES = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
