"""
What changed in one tensor: ``xor`` and ``overwrite`` of its bytes, compressed, or ``sparse`` elements.

The first two are those of slime's deltas on disk, which SGLang's ``/pull_weights`` puts on: ``xor`` of all bytes, or
their count, positions and new values. The third has flat indices and values, as vLLM's sparse patches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from layerstore.dtypes import by_code
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.format import Bytes

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

Encoding = Literal["xor", "overwrite", "sparse"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

COMPRESSIONS: dict[Encoding, str] = {"xor": "zstd", "overwrite": "zstd", "sparse": "none"}

INDICES, VALUES = ".indices", ".values"
"""What the parts of a sparse tensor are called, behind its name."""

_LEVEL = 1
"""Of zstd: higher ones take several times as long for a few percent."""

_POSITIONS_MAX = 1 << 32
_INDICES_MAX = 1 << 31

Part = tuple[str, str, bytes]
"""A part's suffix, its element type, and its bytes."""


def count_changed(old: Bytes, new: Bytes, *, dtype: str) -> int:
    """Return how many elements differ."""
    import numpy as np

    return int(np.count_nonzero(_elements(old, dtype) != _elements(new, dtype)))


def encode(name: str, old: Bytes, new: Bytes, *, dtype: str, encoding: Encoding) -> list[Part]:
    """
    Return the parts that make *new* of *old*, the bytes of the tensor *name*.

    Raises:
        Unsupported: It is too large for the encoding.
    """
    import numpy as np

    if encoding == "xor":
        return [("", "U8", _compressed(np.bitwise_xor(_elements(old, "U8"), _elements(new, "U8"))))]
    limit = _POSITIONS_MAX if encoding == "overwrite" else _INDICES_MAX * by_code(dtype).bytes
    if len(new) >= limit:
        raise Unsupported(f"{name!r} has {len(new)} bytes, too many for {encoding}", hint="--encoding xor has no limit")
    elements = _elements(new, "U8" if encoding == "overwrite" else dtype)
    changed = np.flatnonzero(_elements(old, "U8" if encoding == "overwrite" else dtype) != elements)
    if encoding == "sparse":
        return [(INDICES, "I32", changed.astype("<i4").tobytes()), (VALUES, dtype, elements[changed].tobytes())]
    parts = [np.array([changed.size], "<u4").view("u1"), changed.astype("<u4").view("u1"), elements[changed]]
    return [("", "U8", _compressed(np.concatenate(parts)))]


def decode_into(tensor: bytearray, parts: Sequence[bytes], *, dtype: str, encoding: Encoding) -> None:
    """
    Change the bytes of *tensor* as *parts* say, which are in the order of `encode`.

    Raises:
        SourceCheckpoint: They do not fit it.
    """
    import numpy as np
    import zstandard

    try:
        if encoding == "sparse":
            _elements(tensor, dtype)[np.frombuffer(parts[0], "<i4")] = _elements(parts[1], dtype)
            return
        # No tensor needs more: each byte that changes has four of position and one of value.
        held, data = _elements(tensor, "U8"), _decompressed(parts[0], size_bytes_max=5 * len(tensor) + 4)
        if encoding == "xor":
            np.bitwise_xor(held, data, out=held)
            return
        end = 4 + 4 * int(data[:4].view("<u4")[0])
        held[data[4:end].view("<u4")] = data[end:]
    except (ValueError, IndexError, zstandard.ZstdError) as exc:
        raise SourceCheckpoint(f"the delta does not fit its tensor ({exc})", hint="copy the delta again") from exc


def _elements(data: Bytes, dtype: str) -> "Array":
    """Return *data* as integers of the width of *dtype*: only bits are compared."""
    import numpy as np

    return np.frombuffer(data, f"<u{by_code(dtype).bytes}")


def _compressed(data: "Array") -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compress(data.data)


def _decompressed(data: bytes, *, size_bytes_max: int) -> "Array":
    import numpy as np
    import zstandard

    claimed = zstandard.frame_content_size(data)
    if not 0 <= claimed <= size_bytes_max:
        raise ValueError(f"it claims {claimed} bytes")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), "u1")
