"""The codings for who moves bytes: numbers come and go as buffers of fp32."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from layerstore.coding.codings import Coding
from layerstore.coding.measure import Error, error

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# How numpy reads the parts.
_NUMPY = {"U8": "u1", "BF16": "<u2"}


class Coded(NamedTuple):
    """Numbers that were coded."""

    codes: memoryview
    scales: memoryview
    decoded: memoryview
    """What they decode to."""
    lost: Error


def code(coding: Coding, values: memoryview, reference: memoryview | None) -> Coded:
    """Code *values*, whole blocks or the last ones of a slice; raises NotCodable."""
    import numpy as np

    numbers, referred = _floats(values), None if reference is None else _floats(reference)
    parts = coding.encode(numbers, referred)
    decoded = np.empty_like(numbers)
    coding.decode(parts, decoded, referred)
    codes, scales = (part.data.cast("B") for part in parts)
    return Coded(codes, scales, decoded.data.cast("B"), error(numbers, decoded, referred))


def decode(coding: Coding, parts: Sequence[bytes], out: memoryview, reference: bytes | None) -> None:
    """Fill *out* with the numbers that *parts* are."""
    import numpy as np

    described = coding.parts(len(out) // 4)
    arrays = [np.frombuffer(data, _NUMPY[part.dtype]) for data, part in zip(parts, described, strict=True)]
    coding.decode(arrays, _floats(out), None if reference is None else _floats(reference))


def _floats(data: bytes | memoryview) -> "npt.NDArray[np.float32]":
    import numpy as np

    return np.frombuffer(data, "<f4")
