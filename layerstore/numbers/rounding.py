"""
Convert element types: round weights from their fp32 master as the engine does, and convert for exports.

Rounding is to nearest, ties to even. An engine may round NaNs differently, so every derivation is checked bit for bit
before anything relies on it. numpy, and ml_dtypes for its bfloat16, are imported with the first conversion, because
most commands do not need them.
"""

from typing import TYPE_CHECKING, Any

from layerstore.dtypes import by_code

if TYPE_CHECKING:
    import numpy as np

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
    return _rounded(words, target)


def equal_bytes(left: memoryview, right: memoryview) -> bool:
    """Whether both hold the same bytes; faster than Python's own comparison, which goes byte by byte."""
    import numpy as np

    return np.array_equal(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8))


def newly_infinite(data: Bytes, converted: memoryview, *, source: str, target: str) -> int:
    """Count the finite elements of *data* that became infinite in *converted*."""
    infinities = _infinities(converted, target)
    return infinities - _infinities(data, source) if infinities else 0


def _infinities(data: Bytes, dtype: str) -> int:
    import numpy as np

    kind, infinity = _INFINITIES[dtype]
    words = np.frombuffer(data, kind)
    # Doubling a word shifts its sign bit out.
    return int(np.count_nonzero(words + words == words.dtype.type(2 * infinity)))


def _to_float32(data: Bytes, source: str) -> memoryview:
    import numpy as np

    assert source in _INFINITIES, f"{source} is not a type of floats that can be converted"
    with np.errstate(over="ignore", invalid="ignore"):
        return np.frombuffer(data, numpy_type(source)).astype("<f4").data.cast("B")


def numpy_type(dtype: str) -> "np.dtype[Any]":
    """Return the numpy type of the element type *dtype*; not for 8-bit floats, whose bits would be read as integers."""
    import numpy as np

    if dtype == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]  # ml_dtypes has no stub for it
    return np.dtype(by_code(dtype).numpy)


def _rounded(data: Bytes, target: str) -> memoryview:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):  # overflow to infinity, as in the engine
        rounded = np.frombuffer(data, "<f4").astype(numpy_type(target)).view("<u2")
    if target == "BF16":
        # ml_dtypes keeps the sign of a NaN. Existing stores hold weights derived without that sign, so drop it.
        is_negative_nan = rounded == _BF16_NEGATIVE_NAN
        if is_negative_nan.any():
            rounded[is_negative_nan] = _BF16_NAN
    return rounded.data.cast("B")


_ROUNDINGS = {("F32", "BF16"), ("F32", "F16")}
_BF16_NAN, _BF16_NEGATIVE_NAN = 0x7FC0, 0xFFC0

# For each type, the unsigned integer type of the same size, and the bit pattern of infinity.
_INFINITIES = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
