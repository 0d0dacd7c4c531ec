"""
Precision: how finely a save keeps its layers. Which layers a save keeps is decided by the policy.

An exact save is bit for bit what the trainer had. Between exact saves, a compact save keeps every layer in fewer bytes:
Adam's moments in 8 or 4 bits, masters as differences to an exact version. A compact save never refers to another
compact save, so errors do not add up, and losing a compact file costs one save.
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
"""The flag of a record in which some layers are coded, and may refer to objects of older versions."""

PrecisionName = Literal["exact", "moments8", "delta8", "delta4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """One precision: the coding for each part of a layer; empty for a part that is kept as it is."""

    name: str
    help: str
    master: str = ""
    signed: str = ""
    """For Adam's first moment, and states like it."""
    positive: str = ""
    """For Adam's second moment, and states like it, which must never shrink by orders of magnitude."""

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
    """The precision of a series of saves, and how often a version of a layer is kept exactly instead."""

    precision: Precision = field(default_factory=lambda: PRECISIONS["exact"])
    every: int | None = EXACT_EVERY
    """Every Nth version of a layer is exact; None: only the first is."""

    def is_exact(self, before: int | None) -> bool:
        """Whether the next version is exact; *before* counts the compact ones before it, or is None for the first."""
        if self.precision.is_exact or before is None:
            return True
        return self.every is not None and before + 1 >= self.every


def count_or_none(text: str) -> int | None:
    """
    Return *text*, the value of ``--exact-every``, as a number, or None for ``none``.

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
    """Return the `Keyframes` that the two options describe; raises InvalidInput if they are invalid."""
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
    """Return, for each layer that is *compact* now, its number of consecutive compact versions, including this one."""
    return {layer: 1 + (before[layer].compact if layer in before else 0) for layer in compact}


def flagged(flags: Iterable[str], layers: Iterable[LayerEntry]) -> tuple[str, ...]:
    """Return *flags* with `COMPACT` if any of *layers* is compact, otherwise without it."""
    kept = {*flags, COMPACT} if any(entry.compact for entry in layers) else {*flags} - {COMPACT}
    return tuple(sorted(kept))


def stated(precision: str, layers: Iterable[LayerEntry]) -> str:
    """Return the precision that a record of *layers* states: ``exact`` if all are exact, whatever was requested."""
    return precision if any(entry.compact for entry in layers) else "exact"
