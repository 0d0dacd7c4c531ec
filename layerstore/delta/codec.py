"""
The changes in one tensor, computed in blocks: either the ``xor`` of all bytes, compressed, or the changed elements.

``xor`` is the encoding of slime's deltas on disk, which SGLang's ``/pull_weights`` applies. The other, ``sparse``, has
flat indices and values, like vLLM's sparse patches.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from layerstore.dtypes import by_code
from layerstore.errors import SourceCheckpoint, Unsupported
from layerstore.hashing import Bytes
from layerstore.limits import MIB

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[Any]

Encoding = Literal["xor", "sparse"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

COMPRESSIONS: dict[Encoding, str] = {"xor": "zstd", "sparse": "none"}

INDICES, VALUES = ".indices", ".values"
"""The suffixes that a sparse tensor's parts append to its name."""

# Indices take several times the bytes of 16-bit elements, so they are never made for a whole tensor at once.
_BLOCK_BYTES = 16 * MIB

_LEVEL = 1
"""The zstd level: higher ones take several times as long to save a few percent."""

_INDICES_MAX = 1 << 31  # files store indices as signed 32-bit integers

Parts: TypeAlias = "dict[str, Array]"
"""The parts that encode a tensor's changes, by their names in a file."""


def encode_tensor(name: str, old: Bytes, new: Bytes, *, dtype: str, encoding: Encoding) -> tuple[Parts, int]:
    """
    Return the parts that turn the bytes *old* of the tensor *name* into *new*, and the number of changed elements.

    Raises:
        Unsupported: The tensor has too many elements for the encoding.
    """
    import ml_dtypes  # noqa: F401  numpy knows bfloat16 by name once this is imported
    import numpy as np
    import zstandard

    width = by_code(dtype).bytes
    if encoding == "sparse" and len(new) // width >= _INDICES_MAX:
        raise Unsupported(f"{name!r} has {len(new) // width} elements, too many for sparse", hint="--encoding xor")
    # Given the size, the frame header states it, and a reader checks it before decompressing.
    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=len(new))
    compressed: list[bytes] = []
    indices: list[Array] = []
    values: list[Array] = []
    count = 0
    for start in range(0, len(new), _BLOCK_BYTES):
        old_elements, new_elements = (
            _elements(memoryview(data)[start : start + _BLOCK_BYTES], dtype) for data in (old, new)
        )
        changed = np.flatnonzero(old_elements != new_elements)
        count += changed.size
        if encoding == "xor":
            compressed.append(compressor.compress(np.bitwise_xor(old_elements, new_elements).data))
        else:
            indices.append((changed + start // width).astype("<i4"))
            values.append(new_elements[changed])
    if encoding == "xor":
        return {name: np.frombuffer(b"".join([*compressed, compressor.flush()]), "u1")}, count
    new_values = np.concatenate(values).view(by_code(dtype).torch_name)
    return {name + INDICES: np.concatenate(indices), name + VALUES: new_values}, count


def part_bytes_max(size_bytes: int, *, dtype: str) -> int:
    """Return the maximum size of a part of a tensor of *size_bytes*."""
    # For xor, more than zstd adds to bytes that it cannot compress; for sparse, an index of 4 bytes per element.
    return max(size_bytes + size_bytes // 128 + 1024, 4 * size_bytes // by_code(dtype).bytes)


def decode_into(tensor: bytearray, parts: Sequence[bytes], *, dtype: str, encoding: Encoding) -> None:
    """
    Apply *parts*, in the order of `encode_tensor`, to the bytes of *tensor*.

    Raises:
        SourceCheckpoint: The parts do not fit the tensor.
    """
    import numpy as np
    import zstandard

    try:
        if encoding == "sparse":
            _elements(tensor, dtype)[np.frombuffer(parts[0], "<i4")] = _elements(parts[1], dtype)
            return
        held = _elements(tensor, "U8")
        np.bitwise_xor(held, _decompressed(parts[0], size_bytes_max=len(tensor)), out=held)
    except (ValueError, IndexError, zstandard.ZstdError) as exc:
        raise SourceCheckpoint("the delta's data for this tensor is damaged", hint="copy the delta again") from exc


def _elements(data: Bytes, dtype: str) -> "Array":
    """Return *data* as integers of the width of *dtype*: only bits are compared."""
    import numpy as np

    return np.frombuffer(data, f"<u{by_code(dtype).bytes}")


def _decompressed(data: bytes, *, size_bytes_max: int) -> "Array":
    import numpy as np
    import zstandard

    claimed = zstandard.frame_content_size(data)
    if not 0 <= claimed <= size_bytes_max:
        raise ValueError(f"it claims {claimed} bytes")
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), "u1")
