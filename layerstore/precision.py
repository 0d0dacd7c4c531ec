"""
Precision: how finely a save keeps its layers. Which layers those are is for the policy to say.

An exact save is bit for bit what the trainer had. Between exact ones, a compact save keeps every layer in fewer bytes:
Adam's moments in 8 or 4 bits, masters as differences to an exact version. It never refers to another compact one, so
errors do not add up, and what is lost with a file is one save.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from layerstore.errors import InvalidInput
from layerstore.model import Kind, LayerEntry
from layerstore.nearest import did_you_mean, nearest

_SIGNED = frozenset({"exp_avg", "momentum_buffer"})
_POSITIVE = frozenset({"exp_avg_sq", "max_exp_avg_sq"})

EXACT_EVERY = 10

COMPACT = "compact"
"""Flags a record: some of its layers are coded, and may refer to objects of older versions."""

PrecisionName = Literal["exact", "moments8", "delta8", "delta4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One precision: the coding of each part of a layer, empty for what is kept as it is."""

    name: str
    help: str
    master: str = ""
    signed: str = ""
    """Of Adam's first moment, and of what is like it."""
    positive: str = ""
    """Of Adam's second moment, which must never become smaller than it was by orders of magnitude."""

    @property
    def is_exact(self) -> bool:
        """Whether it keeps every bit."""
        return not (self.master or self.signed or self.positive)

    def coding(self, kind: Kind, state: str, dtype: str) -> str:
        """Return the name of the coding for a tensor; empty if it is kept as it is."""
        if dtype != "F32":
            return ""
        if kind is Kind.MASTER:
            return self.master
        if kind is Kind.OPTIMIZER:
            return self.signed if state in _SIGNED else self.positive if state in _POSITIVE else ""
        return ""


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="exact", help="every bit, as training had it, in 12 bytes a parameter"),
        Precision(
            name="moments8",
            help="every bit of the weights, Adam's moments in 8 bits, in 6 bytes",
            signed="companded8",
            positive="logarithmic8",
        ),
        Precision(
            name="delta8",
            help="how far the weights have moved since an exact save, in 8 bits, and moments in 8, in 3 bytes",
            master="difference8",
            signed="companded8",
            positive="logarithmic8",
        ),
        Precision(
            name="delta4",
            help="the same in 4 bits, in 1.6 bytes",
            master="difference4",
            signed="companded4",
            positive="logarithmic4",
        ),
    )
}
"""Every precision, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyframes:
    """The precision of a series of saves, and how often a layer is kept exactly in between."""

    precision: Precision = field(default_factory=lambda: PRECISIONS["exact"])
    every: int | None = EXACT_EVERY
    """Every Nth version of a layer is exact; None for the first alone."""

    def is_exact(self, before: int | None) -> bool:
        """Whether the next version of a layer is exact, after *before* compact ones in a row; None if it has none."""
        if self.precision.is_exact or before is None:
            return True
        return self.every is not None and before + 1 >= self.every


def count_or_none(text: str) -> int | None:
    """
    Return the number that *text*, the value of ``--exact-every``, is, or None for ``none``.

    >>> count_or_none("20"), count_or_none("none")
    (20, None)
    """
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError as exc:
        raise InvalidInput(f"invalid count {text!r} for --exact-every", hint="give a number, or none") from exc


def keyframes(precision: str, exact_every: int | None) -> Keyframes:
    """Return what the two options mean; raises InvalidInput if they mean nothing."""
    if precision not in PRECISIONS:
        raise InvalidInput(
            f"there is no precision {precision!r}",
            hint=did_you_mean(nearest(str(precision), PRECISIONS), else_=f"choose one of {', '.join(PRECISIONS)}"),
        )
    if exact_every is not None and exact_every < 1:
        raise InvalidInput(
            f"exact_every is {exact_every}: every Nth version of a layer is exact, N at least 1",
            hint="leave it out for every 10th; with none (None in Python) only the first is exact",
        )
    return Keyframes(precision=PRECISIONS[precision], every=exact_every)


def compact_counts(before: Mapping[str, LayerEntry], compact: Collection[str]) -> dict[str, int]:
    """Return how many compact versions in a row end with those of the layers that are *compact* now."""
    return {layer: 1 + (before[layer].compact if layer in before else 0) for layer in compact}


def flagged(flags: Iterable[str], layers: Iterable[LayerEntry]) -> tuple[str, ...]:
    """Return *flags*, and that some of *layers* are compact if any is."""
    kept = {*flags, COMPACT} if any(entry.compact for entry in layers) else {*flags} - {COMPACT}
    return tuple(sorted(kept))


def stated(precision: str, layers: Iterable[LayerEntry]) -> str:
    """Return what a record of *layers* says of its precision: ``exact`` if all of them are, whatever was asked for."""
    return precision if any(entry.compact for entry in layers) else "exact"
