"""How much a coding loses."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_PIECE = 1 << 17
"""Elements that are worked on at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """Sums over elements; those of several pieces add up."""

    elements: int = 0
    greatest: float = 0.0
    """The largest distance of a decoded number from what it was."""
    squares: float = 0.0
    """Sum of the squares of these distances."""
    greatest_value: float = 0.0
    """The largest magnitude of what was coded: a movement for differences, else a value."""
    value_squares: float = 0.0
    """Sum of the squares of these."""

    def __add__(self, other: Self) -> "Error":
        """Return the error of both."""
        return Error(
            elements=self.elements + other.elements,
            greatest=max(self.greatest, other.greatest),
            squares=self.squares + other.squares,
            greatest_value=max(self.greatest_value, other.greatest_value),
            value_squares=self.value_squares + other.value_squares,
        )

    @property
    def relative_rms(self) -> float:
        """Root mean square of the error over that of what was coded; infinite if that was all zeros, and is no more."""
        return _ratio(math.sqrt(self.squares), math.sqrt(self.value_squares))

    @property
    def relative_greatest(self) -> float:
        """The greatest error over the greatest of what was coded."""
        return _ratio(self.greatest, self.greatest_value)


def error(
    values: "npt.NDArray[np.float32]",
    decoded: "npt.NDArray[np.float32]",
    reference: "npt.NDArray[np.float32] | None" = None,
) -> Error:
    """Return how far *decoded* is from *values*, and how far those are from *reference*, or from zero."""
    import numpy as np

    total = Error()
    scratch = np.empty(min(values.size, _PIECE), np.float32)
    for start in range(0, values.size, _PIECE):
        piece = slice(start, start + _PIECE)
        of = values[piece]
        room = scratch[: of.size]
        greatest, squares = _sums(np.subtract(of, decoded[piece], out=room), room)
        coded = of if reference is None else np.subtract(of, reference[piece], out=room)
        greatest_value, value_squares = _sums(coded, room)
        total += Error(
            elements=of.size,
            greatest=greatest,
            squares=squares,
            greatest_value=greatest_value,
            value_squares=value_squares,
        )
    return total


def _sums(numbers: "npt.NDArray[np.float32]", room: "npt.NDArray[np.float32]") -> tuple[float, float]:
    """Return the greatest magnitude and the sum of squares of *numbers*; *room* may be the same array."""
    import numpy as np

    np.abs(numbers, out=room)
    greatest = float(room.max())
    # Squares of second moments are too small for fp32, others may be too large.
    exponent = max(math.frexp(greatest)[1], -120)
    room *= np.float32(2.0**-exponent)
    np.multiply(room, room, out=room)
    # Not a dot product: its order depends on the machine.
    return greatest, float(np.add.reduce(room)) * 4.0**exponent


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0
