"""
The distance between two streams of numbers: relative L2, cosine, and relative movement.

Both streams come in chunks of raw bytes, memory use is constant, and sums are kept in float64. numpy is imported with
the first chunk, since most commands do not need it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from layerstore.numbers.rounding import numpy_type
from layerstore.tree import Tree

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The least root mean square that is assumed for a layer, so that a layer that began with zeros has a finite movement.
# It is below that of initial weights.
_FLOOR = 1e-3
_NOT_MEASURED = frozenset({"C64", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """The distance between two versions of a layer."""

    elements: int
    """How many elements were compared."""
    relative_l2: float
    """L2 norm of the difference, divided by the L2 norm of the first; infinite if only the first is all zeros."""
    cosine: float
    """Cosine of the angle between the two; NaN if one is all zeros."""
    nonfinite_a: int | None
    """NaNs and infinities in the first; None if the two are known to be equal, and so were not read."""
    nonfinite_b: int | None
    left_out: tuple[str, ...] = ()
    """Parameters that cannot be compared: they exist on one side only, differ in shape, or are not numbers."""


def nothing_between(elements: int) -> Distance:
    """Return the distance of bytes that are known to be equal."""
    return Distance(elements=elements, relative_l2=0.0, cosine=1.0, nonfinite_a=None, nonfinite_b=None)


def can_measure(dtype: str) -> bool:
    """Whether elements of *dtype* are real numbers that numpy can read, so that they have a distance."""
    return dtype not in _NOT_MEASURED


class Meter:
    """Accumulates the distance over pairs of chunks."""

    def __init__(self) -> None:
        self._elements = 0.0
        self._aa = self._bb = self._ab = self._dd = 0.0
        self._nonfinite_a = self._nonfinite_b = 0

    def add(self, a: memoryview, b: memoryview, *, dtype_a: str, dtype_b: str, weight: float = 1.0) -> None:
        """Add the next elements, the same number from each side; each element counts as *weight* elements."""
        import numpy as np

        first, second = _numbers(a, dtype_a), _numbers(b, dtype_b)
        assert first.size == second.size, "both sides advance together"
        with np.errstate(over="ignore", invalid="ignore"):  # non-finite numbers are counted below, and reported
            difference = first - second
            self._aa += weight * (aa := float(first @ first))
            self._bb += weight * (bb := float(second @ second))
            self._ab += weight * float(first @ second)
            self._dd += weight * float(difference @ difference)
        self._elements += weight * first.size
        # A sum of squares is finite only if all its terms are, so most chunks need no second pass.
        self._nonfinite_a += 0 if math.isfinite(aa) else int(np.count_nonzero(~np.isfinite(first)))
        self._nonfinite_b += 0 if math.isfinite(bb) else int(np.count_nonzero(~np.isfinite(second)))

    def include(self, other: Self) -> None:
        """Add everything that *other* has added up."""
        self._elements += other._elements
        self._aa += other._aa
        self._bb += other._bb
        self._ab += other._ab
        self._dd += other._dd
        self._nonfinite_a += other._nonfinite_a
        self._nonfinite_b += other._nonfinite_b

    def distance(self, *, left_out: tuple[str, ...] = ()) -> Distance:
        """Return the distance of everything added so far."""
        return Distance(
            elements=round(self._elements),
            relative_l2=self._relative_l2(),
            cosine=self._cosine(),
            nonfinite_a=self._nonfinite_a,
            nonfinite_b=self._nonfinite_b,
            left_out=left_out,
        )

    def movement(self) -> float | None:
        """
        Return the relative L2, with a lower limit on the norm of the first; None if nothing was added.

        Without the limit, a layer that began with zeros would have moved infinitely far.
        """
        return movement_of(dd=self._dd, aa=self._aa, elements=self._elements) if self._elements else None

    def _relative_l2(self) -> float:
        if self._dd == 0:  # checked first: two layers of zeros are equal
            return 0.0
        return math.sqrt(self._dd) / math.sqrt(self._aa) if self._aa else math.inf

    def _cosine(self) -> float:
        lengths = math.sqrt(self._aa) * math.sqrt(self._bb)  # the product of the sums could overflow
        cosine = self._ab / lengths if lengths else math.nan
        # Rounding may exceed 1; NaN passes through.
        return math.copysign(1.0, cosine) if abs(cosine) > 1 else cosine


def movement_of(*, dd: float, aa: float, elements: float) -> float:
    """Return the relative movement from the sums of squares of the difference (*dd*) and of the first (*aa*)."""
    return math.sqrt(dd) / max(math.sqrt(aa), _FLOOR * math.sqrt(elements))


# -- movement weighted by gradients ----------------------------------------------------------------------------------

SECOND_MOMENT = "exp_avg_sq"
"""Adam's name for the running mean of squared gradients; its square root is the size of an element's gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movements:
    """How far each layer has moved since its last save, by two measures."""

    relative: Mapping[str, float] = field(default_factory=dict)
    """Relative to the layer's norm."""
    weighted: Mapping[str, float] = field(default_factory=dict)
    """
    For each layer: the mean of ``movement * gradient size`` over its elements, divided by the mean of
    ``magnitude * gradient size`` over all measured layers' elements. Empty if the optimizer lacks second moments of
    some layer.
    """

    def decisions(self) -> dict[Tree, Tree]:
        """Return the movements as a record keeps them."""
        kept = {"movements": self.relative, "weighted_movements": self.weighted}
        return {name: dict(movements.items()) for name, movements in kept.items() if movements}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """Sums over a layer's elements, each weighted by the size of its gradients."""

    moved: float
    """The sum of the elements' movements."""
    lengths: float
    """The sum of the elements' magnitudes."""
    elements: float


def weighted_movements(layers: Mapping[str, Weighted]) -> dict[str, float]:
    """
    Return the gradient-weighted movement of each of *layers*; an empty mapping if no gradient is known.

    A layer without elements is frozen, and has not moved.

    >>> weighted_movements({"a": Weighted(moved=2.0, lengths=10.0, elements=10)})
    {'a': 0.2}
    """
    finite = [
        movement for movement in layers.values() if math.isfinite(movement.lengths)
    ]  # one non-finite layer must not spoil the rest
    elements, lengths = sum(movement.elements for movement in finite), sum(movement.lengths for movement in finite)
    if not lengths:
        return {}
    mean = lengths / elements
    return {
        layer: movement.moved / movement.elements / mean if movement.elements else 0.0
        for layer, movement in layers.items()
    }


class Numbers(NamedTuple):
    """Numbers as raw bytes."""

    data: memoryview
    dtype: str


class WeightedMeter:
    """Adds up the sums of one layer, chunk by chunk."""

    def __init__(self) -> None:
        self._moved = self._lengths = self._elements = 0.0

    def add(self, old: Numbers, new: Numbers, squares: Numbers, *, weight: float = 1.0) -> None:
        """Add elements: their old and new masters, and their second moments; each element counts *weight* times."""
        import numpy as np

        first, second, third = (_numbers(numbers.data, numbers.dtype) for numbers in (old, new, squares))
        with np.errstate(over="ignore", invalid="ignore"):  # a non-finite result makes its layer due
            roots = np.sqrt(third)
            self._moved += weight * float(roots @ np.abs(second - first))
            self._lengths += weight * float(roots @ np.abs(first))
        self._elements += weight * first.size

    def sums(self) -> Weighted:
        """Return the sums of everything added so far."""
        return Weighted(moved=self._moved, lengths=self._lengths, elements=self._elements)


def _numbers(data: memoryview, dtype: str) -> "npt.NDArray[np.float64]":
    import numpy as np

    return np.frombuffer(data, numpy_type(dtype)).astype(np.float64)
