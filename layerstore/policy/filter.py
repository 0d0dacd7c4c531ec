"""
``filter``: the ends of every stack and the norms at every save, a share of the rest now and then, in rotation.

The first and last blocks move most; what lies between can wait.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from layerstore.errors import InvalidInput
from layerstore.policy.anatomy import anatomy, norms
from layerstore.policy.due import Save
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True)
class Filter:
    """Some layers always, the others in turns."""

    first: int = 2
    """How many blocks at the start of each stack are always due."""
    last: int = 2
    """How many at its end."""
    share: Fraction = Fraction(1, 2)
    """How much of the rest is due at each turn."""
    every: int = 5
    """A turn comes at every so manyth save."""
    aux: Literal["rotate", "always"] = "rotate"
    """Whether embeddings and heads wait for their turn too; norms never do."""

    name: ClassVar[str] = "filter"
    by_number: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 0:
            raise InvalidInput(f"filter cannot keep {min(self.first, self.last)} blocks", hint="first and last are ≥ 0")
        if not 0 < self.share <= 1:
            raise InvalidInput(f"filter cannot save a share of {self.share}", hint="a share is like 1/2: above 0, ≤ 1")
        if self.every < 1:
            raise InvalidInput(f"filter cannot come at every {self.every}th save", hint="every is 1 or more")
        if self.aux not in {"rotate", "always"}:
            raise InvalidInput(f"filter knows no aux {self.aux!r}", hint="aux is rotate or always")

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings."""
        return {
            "first": self.first,
            "last": self.last,
            "share": str(self.share),
            "every": self.every,
            "aux": self.aux,
        }

    def due(self, save: Save) -> frozenset[str]:
        """Return what is always due, and the turn's share of the rest."""
        parts = anatomy(save.layers)
        always = parts.ends(self.first, self.last) | norms(parts.auxiliary)
        if self.aux == "always":
            always |= frozenset(parts.auxiliary)
        if save.number % self.every:
            return always
        rest = [layer for layer in save.layers if layer not in always]
        if not rest:
            return always
        # A window that moves on by its own length: in a whole number of turns nobody is left out.
        length = -(-len(rest) * self.share.numerator // self.share.denominator)
        start = save.number // self.every * length
        return always | {rest[(start + offset) % len(rest)] for offset in range(length)}
