"""
Convert element types: round weights from their fp32 master as the engine does, and convert for exports.

Rounding is to nearest, ties to even. NaNs may round differently elsewhere, so every derivation is checked bit for bit
before anything relies on it. numpy is imported with the first conversion, because most commands need none.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Bytes = bytes | bytearray | memoryview


def can_derive(master: str, weights: str) -> bool:
    """Whether weights of the type *weights* may be derived from a master of the type *master*."""
    return master == weights or (master, weights) in _ROUNDINGS


def can_convert(source: str, target: str) -> bool:
    """Whether `convert` supports converting *source* to *target*."""
    return source == target or (source in _INFINITIES and can_derive("F32", target))


def convert(data: Bytes, *, source: str, target: str) -> memoryview:
    """
    Return the *source*-typed elements of *data* as *target*: widened, or rounded to nearest, ties to even.

    As in torch, all types other than fp32 are first converted to fp32.
    """
    if source == target:
        return memoryview(data).cast("B")
    words = data if source == "F32" else _to_float32(data, source)
    if target == "F32":
        return memoryview(words).cast("B")
    import numpy as np

    return _ROUNDINGS["F32", target](np.frombuffer(words, dtype="<u4")).data.cast("B")


def equal_bytes(left: memoryview, right: memoryview) -> bool:
    """Whether both hold the same bytes; Python's own comparison looks at one byte at a time."""
    import numpy as np

    return np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8))


def newly_infinite(data: Bytes, converted: memoryview, *, source: str, target: str) -> int:
    """Count the finite elements of *data* that became infinite in *converted*."""
    found = _infinities(converted, target)
    return found - _infinities(data, source) if found else 0


def _infinities(data: Bytes, dtype: str) -> int:
    import numpy as np

    kind, infinity = _INFINITIES[dtype]
    words = np.frombuffer(data, kind)
    # Doubling a word shifts its sign out.
    return int(np.count_nonzero(words + words == words.dtype.type(2 * infinity)))


def _to_float32(data: Bytes, source: str) -> memoryview:
    import numpy as np

    if source == "BF16":
        words = np.frombuffer(data, "<u2").astype("<u4")
        words <<= np.uint32(16)
        return words.data.cast("B")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.frombuffer(data, {"F16": "<f2", "F64": "<f8"}[source]).astype("<f4").data.cast("B")


def _to_bfloat16(words: "npt.NDArray[np.uint32]") -> "npt.NDArray[Any]":
    import numpy as np

    # Add just under half of the last kept bit, plus that bit itself, so that ties go to even. A carry into the
    # exponent rounds up to the next power of two, or to infinity.
    odd = words >> np.uint32(16)
    odd &= np.uint32(1)
    odd += np.uint32(0x7FFF)
    odd += words
    # Little-endian: the upper half of each word is every second element.
    rounded = odd.view("<u2")[1::2].copy()
    # Comparing masked bits would take two more arrays of this size, which would cost more than everything else.
    is_nan = np.isnan(words.view("<f4"))
    if is_nan.any():
        rounded[is_nan] = 0x7FC0
    return rounded


def _to_float16(words: "npt.NDArray[np.uint32]") -> "npt.NDArray[Any]":
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # overflow to infinity, as in the engine
        return words.view("<f4").astype("<f2")


_ROUNDINGS: dict[tuple[str, str], Callable[["npt.NDArray[np.uint32]"], "npt.NDArray[Any]"]] = {
    ("F32", "BF16"): _to_bfloat16,
    ("F32", "F16"): _to_float16,
}

# For each type, the unsigned integer of its size, and the bits of infinity.
_INFINITIES = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
