"""The layout of each coding: bits, scales and parts, without the arithmetic."""

from dataclasses import dataclass
from typing import Literal, Self

BLOCK = 128
"""The number of elements that share scales. The first block begins at the start of a slice."""


class NotCodable(ValueError):
    """These numbers cannot be coded and must be kept exactly; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """The error that coding makes; the errors of several pieces add up."""

    greatest: float = 0.0
    """The largest distance between a decoded number and the original."""
    squares: float = 0.0
    """The sum of the squares of these distances."""
    greatest_value: float = 0.0
    """The largest magnitude among the coded numbers: the values, or their differences to a reference."""
    value_squares: float = 0.0
    """The sum of the squares of the coded numbers."""

    def __add__(self, other: Self) -> "Error":
        """Return the error of both pieces together."""
        return Error(
            greatest=max(self.greatest, other.greatest),
            squares=self.squares + other.squares,
            greatest_value=max(self.greatest_value, other.greatest_value),
            value_squares=self.value_squares + other.value_squares,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that store a coded tensor."""

    suffix: str
    """Appended to the tensor's name; empty for the codes."""
    dtype: str
    """Element type, as safetensors spells it."""
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The layout of one coding."""

    name: str
    kind: Literal["companded", "logarithmic", "difference"]
    bits: Literal[8, 4]
    """Bits per code. Two codes of 4 bits share a byte, the first in its low half."""

    @property
    def needs_reference(self) -> bool:
        """Whether differences to a reference are coded; decoding needs the same reference."""
        return self.kind == "difference"

    @property
    def scales_per_block(self) -> int:
        """How many scales each block has."""
        return 2 if self.kind == "logarithmic" else 1

    def parts(self, elements: int) -> tuple[Part, ...]:
        """
        Return the tensors that hold *elements* numbers: their codes, and their scales.

        >>> Spec(name="", kind="logarithmic", bits=4).parts(129)
        (Part(suffix='', dtype='U8', elements=65), Part(suffix=':scales', dtype='BF16', elements=4))
        """
        blocks = -(-elements // BLOCK)
        return (
            Part("", "U8", -(-elements * self.bits // 8)),
            Part(":scales", "BF16", blocks * self.scales_per_block),
        )

    @property
    def top_code(self) -> int:
        """The largest code."""
        signless = 1 << self.bits - 1
        return 2 * signless - 1 if self.kind == "logarithmic" else signless - 1
