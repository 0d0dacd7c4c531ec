"""
The codings by name, and what each makes of a tensor. Their exact definition: docs/reference/format.md, "Codings".

numpy and torch are imported with the first numbers, since most commands need neither.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from layerstore.coding.spec import Spec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


class Coding(Spec):
    """A way to keep fp32 numbers in few bits."""

    __slots__ = ()

    def encode(
        self, values: "npt.NDArray[np.float32]", reference: "npt.NDArray[np.float32] | None" = None
    ) -> "tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]":
        """
        Return the codes and the scales (the bits of bfloat16) of *values*, which begin on a block.

        They are the same on every machine, however the values are cut into calls.

        Raises:
            NotCodable: NaN, infinity, or a sign where there must be none.
        """
        from layerstore.coding.kernels import encode

        return encode(self, values, reference)

    def encode_torch(
        self, values: "torch.Tensor", reference: "torch.Tensor | None" = None
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """
        Return the same bytes as `encode`, on the device of *values*, without waiting for it.

        What cannot be coded does not raise here: give the parts to `check` once they are on the host.
        """
        from layerstore.coding.kernels_torch import encode

        return encode(self, values, reference)

    def check(self, scales: "npt.NDArray[np.uint16]") -> None:
        """
        Check the scales that `encode_torch` made.

        Raises:
            NotCodable: NaN, infinity, or a sign where there must be none.
        """
        from layerstore.coding.kernels import check

        check(self, scales)

    def decode(
        self,
        parts: "Sequence[npt.NDArray[Any]]",
        out: "npt.NDArray[np.float32]",
        reference: "npt.NDArray[np.float32] | None" = None,
    ) -> None:
        """Fill *out* with the numbers of whole blocks, or the last ones of a slice; it may be *reference* itself."""
        from layerstore.coding.kernels import decode

        codes, scales = parts
        decode(self, codes, scales, out, reference)


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
