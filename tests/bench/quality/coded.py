"""
What is left of a model's state that was kept less finely, and how many bytes that takes: the codings, without a store.

Besides the precisions of layerstore there are ways that it does not offer. The evidence says what each would cost.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layerstore.coding import CODINGS
from layerstore.precision import PRECISIONS, Precision

Floats = npt.NDArray[np.float32]

_SIZES = {"U8": 1, "BF16": 2}
_EPSILON = 1e-8
"""Of Adam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to keep a state between two exact saves."""

    name: str
    precision: Precision
    rounds_masters: bool = False
    """To bf16, instead of the precision's own way."""
    drops_moments: bool = False
    factors: bool = False
    """The second moment of a matrix: only the means of its rows and columns."""

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Return what a parameter of *shape* takes: master and moments."""
        elements = math.prod(shape)
        master = 2 * elements if self.rounds_masters else _coded_bytes(self.precision.master, elements)
        if self.drops_moments:
            return master
        is_factored = self.factors and len(shape) == 2
        second = 4 * sum(shape) if is_factored else _coded_bytes(self.precision.positive, elements)
        return master + _coded_bytes(self.precision.signed, elements) + second


WAYS = {
    way.name: way
    for way in (
        *(Way(name=name, precision=of) for name, of in PRECISIONS.items() if not of.is_exact),
        Way(name="delta4, v factored", precision=PRECISIONS["delta4"], factors=True),
        Way(name="bf16 masters, moments8", precision=PRECISIONS["moments8"], rounds_masters=True),
        Way(name="moments dropped", precision=PRECISIONS["moments8"], drops_moments=True),
    )
}
"""All that are compared, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The master and the moments of one parameter, in its shape."""

    master: Floats
    first: Floats
    second: Floats


def kept(way: Way, of: Parameter, *, keyframe: Floats) -> Parameter:
    """Return what is left of a parameter that is kept in this *way*, as differences to the master *keyframe*."""
    master = rounded(of.master) if way.rounds_masters else _decoded(way.precision.master, of.master, keyframe)
    if way.drops_moments:
        return Parameter(master=master, first=np.zeros_like(of.first), second=np.zeros_like(of.second))
    second = factored(of.second) if way.factors else _decoded(way.precision.positive, of.second)
    return Parameter(master=master, first=_decoded(way.precision.signed, of.first), second=second)


def factored(second: Floats) -> Floats:
    """
    Return what the means of rows and columns say of a matrix; anything else as it is.

    >>> factored(np.array([[1, 2], [2, 4]], np.float32)).tolist()
    [[1.0, 2.0], [2.0, 4.0]]
    """
    if second.ndim != 2:
        return second
    whole = max(float(second.mean(dtype=np.float64)), 1e-38)
    rows, columns = second.mean(1, dtype=np.float64), second.mean(0, dtype=np.float64)
    return (np.outer(rows, columns) / whole).astype(np.float32)


def rounded(master: Floats) -> Floats:
    """Return what bf16 leaves of *master*."""
    import ml_dtypes

    return master.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclass(slots=True)
class Lost:
    """Sums over parameters of what a way loses."""

    error: float = 0.0
    movement: float = 0.0
    update_error: float = 0.0
    update: float = 0.0

    def add(self, of: Parameter, left: Parameter, *, keyframe: Floats) -> None:
        """Add what one parameter loses."""
        self.error += _square(left.master - of.master)
        self.movement += _square(of.master - keyframe)
        update = _update(of)
        self.update_error += _square(_update(left) - update)
        self.update += _square(update)

    @property
    def of_movement(self) -> float:
        """The error of the masters, relative to how far they moved since the keyframe."""
        return math.sqrt(self.error / self.movement) if self.movement else 0.0

    @property
    def of_update(self) -> float:
        """The error of Adam's update with these moments, relative to its length."""
        return math.sqrt(self.update_error / self.update) if self.update else 0.0


def bytes_of(way: Way, shapes: Iterable[tuple[int, ...]]) -> int:
    """Return what parameters of these *shapes* take."""
    return sum(way.bytes(shape) for shape in shapes)


def _update(of: Parameter) -> Floats:
    return np.asarray(of.first / (np.sqrt(of.second) + np.float32(_EPSILON)), dtype=np.float32)


def _square(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _coded_bytes(coding: str, elements: int) -> int:
    if not coding:
        return 4 * elements
    return sum(part.elements * _SIZES[part.dtype] for part in CODINGS[coding].parts(elements))


def _decoded(name: str, values: Floats, reference: Floats | None = None) -> Floats:
    if not name:
        return values
    coding, flat = CODINGS[name], np.ascontiguousarray(values).ravel()
    base = np.ascontiguousarray(reference).ravel().data if reference is not None and coding.needs_reference else None
    out = np.empty_like(flat)
    coding.encode(flat.data, base, out.data)
    return out.reshape(values.shape)
