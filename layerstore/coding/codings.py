"""
The codings by name. Their exact definition: docs/reference/format.md, "Codings".

numpy is imported when it is first needed, since most commands do without it.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from layerstore.coding.spec import Error, Spec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Coded(NamedTuple):
    """A coded tensor, and the error of coding it."""

    codes: memoryview
    scales: memoryview
    """As the bits of bfloat16 numbers."""
    lost: Error


class Coding(Spec):
    """A way to keep fp32 numbers in few bits; input and output are buffers."""

    __slots__ = ()

    def encode(self, values: memoryview, reference: memoryview | None, out: memoryview) -> Coded:
        """
        Encode *values* and fill *out*, which may be *reference* itself, with the decoded numbers.

        *values* are whole blocks, except at the end of a slice. The codes are the same on every machine, however a
        slice is divided among calls.

        Raises:
            NotCodable: A number is NaN or infinite, or has a minus sign where none is allowed.
        """
        from layerstore.coding.kernels import encode

        referred = None if reference is None else _floats(reference)
        codes, scales, lost = encode(self, _floats(values), referred, _floats(out))
        return Coded(codes.data, scales.data.cast("B"), lost)

    def decode(self, parts: "Sequence[bytes | memoryview]", reference: memoryview | None, out: memoryview) -> None:
        """Decode *parts*, whole blocks except at a slice's end, into *out*, which may be *reference* itself."""
        import numpy as np

        from layerstore.coding.kernels import decode

        codes, scales = np.frombuffer(parts[0], "u1"), np.frombuffer(parts[1], "<u2")
        decode(self, codes, scales, None if reference is None else _floats(reference), _floats(out))


def _floats(data: memoryview) -> "npt.NDArray[np.float32]":
    import numpy as np

    return np.frombuffer(data, "<f4")


CODINGS: Mapping[str, Coding] = MappingProxyType(
    {
        coding.name: coding
        for coding in (
            Coding(name="companded8", kind="companded", bits=8),
            Coding(name="companded4", kind="companded", bits=4),
            Coding(name="logarithmic8", kind="logarithmic", bits=8),
            Coding(name="logarithmic4", kind="logarithmic", bits=4),
            Coding(name="difference8", kind="difference", bits=8),
            Coding(name="difference4", kind="difference", bits=4),
        )
    }
)
