"""
``filter``: the ends of every stack and the norms at every save, and a rotating share of the rest at every n-th save.

The first and last blocks move most; the blocks in between can wait.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from layerstore.arguments import check_fields, named_fields
from layerstore.errors import InvalidInput
from layerstore.layers import anatomy, norms
from layerstore.policy.due import Save
from layerstore.setting import Setting
from layerstore.tree import Tree


def _fraction(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError) as exc:
        raise InvalidInput(f"invalid filter share {text!r}", hint="write it like 1/2 or 0.25") from exc


@named_fields
@dataclass(frozen=True, slots=True)
class Filter:
    """
    Some layers at every save, the others in turns.

    By default, the first and last two blocks of each stack and the norms are always due, and at every fifth save also
    half of the rest, in rotation.
    """

    first: Annotated[int, Setting("the first N blocks are always due", metavar="N")] = 2
    """Blocks at the start of each stack that are always due."""
    last: Annotated[int, Setting("the last N blocks are always due", metavar="N")] = 2
    """Blocks at the end of each stack that are always due."""
    share: Annotated[Fraction | int, Setting("how much of the rest at each turn", metavar="SHARE", read=_fraction)] = (
        Fraction(1, 2)
    )
    """The share of the rest that is due at each turn."""
    every: Annotated[int, Setting("a turn at every Nth save", metavar="N")] = 5
    """The number of saves from one turn to the next."""
    aux: Annotated[Literal["rotate", "always"], Setting("whether embeddings and heads take turns too")] = "rotate"
    """Whether embeddings and heads take turns too; norms are always due."""

    name = "filter"
    composed = "the model's ends and norms from REF, the rest from its last turn"
    by_number: ClassVar[bool] = True
    small: ClassVar[Mapping[str, int]] = {"first": 1, "last": 1}

    def __post_init__(self) -> None:
        check_fields(self)
        if self.first < 0 or self.last < 0:
            raise InvalidInput(f"filter cannot keep {min(self.first, self.last)} blocks", hint="first and last are ≥ 0")
        if not 0 < self.share <= 1:
            raise InvalidInput(f"filter cannot save a share of {self.share}", hint="a share is like 1/2: above 0, ≤ 1")
        if self.every < 1:
            raise InvalidInput(f"filter cannot take turns every {self.every} saves", hint="every is 1 or more")

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """The settings, as a record keeps them."""
        return {
            "first": self.first,
            "last": self.last,
            "share": str(self.share),
            "every": self.every,
            "aux": self.aux,
        }

    def due(self, save: Save) -> frozenset[str]:
        """Return the layers that are always due and, at a turn, that turn's share of the rest."""
        parts = anatomy(save.layers)
        always = parts.ends(self.first, self.last) | norms(parts.auxiliary)
        if self.aux == "always":
            always |= frozenset(parts.auxiliary)
        if save.number % self.every:
            return always
        rest = [layer for layer in save.layers if layer not in always]
        if not rest:
            return always
        # The window moves by its own length at each turn, so every layer gets its turn.
        length = -(-len(rest) * self.share.numerator // self.share.denominator)
        start = save.number // self.every * length
        return always | {rest[(start + offset) % len(rest)] for offset in range(length)}
