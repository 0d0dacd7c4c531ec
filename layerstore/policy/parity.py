"""
``parity``: one half of the model at even saves, the other half at odd ones.

Even blocks go with the output side (norm, head), odd ones with the input side (embeddings).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from layerstore.errors import InvalidInput
from layerstore.layers import block_index
from layerstore.policy.anatomy import anatomy
from layerstore.policy.due import Save
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True)
class Parity:
    """Half of the layers at each save, in turns."""

    fresh: Literal["even", "odd"] | None = None
    """Which half a composite's base supplies; without, the one that its save number says."""
    _shift: int = 0
    """Added to the save's number; set by ``anchored``."""

    name: ClassVar[str] = "parity"
    by_number: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.fresh not in {None, "even", "odd"}:
            raise InvalidInput(f"parity has no half {self.fresh!r}", hint="fresh is even or odd")

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings."""
        return {} if self.fresh is None else {"fresh": self.fresh}

    def anchored(self, number: int) -> Self:
        """Return the policy under which the save *number* writes the half that is to be fresh."""
        if self.fresh is None:
            return self
        return type(self)(fresh=self.fresh, _shift=(number + (self.fresh == "odd")) % 2)

    def due(self, save: Save) -> frozenset[str]:
        """Return one half."""
        remainder = (save.number + self._shift) % 2
        parts = anatomy(save.layers)
        blocks = {block for block in parts.blocks if (block_index(block) or 0) % 2 == remainder}
        return frozenset(blocks.union(parts.input_side if remainder else parts.output_side))
