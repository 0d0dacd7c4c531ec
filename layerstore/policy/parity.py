"""``parity``: alternating halves of the model."""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from layerstore.arguments import check_fields, named_fields
from layerstore.layers import anatomy, block_index
from layerstore.policy.due import Save
from layerstore.setting import Setting
from layerstore.tree import Tree


@named_fields
@dataclass(frozen=True, slots=True)
class Parity:
    """
    Half of the layers at each save, in turns.

    Saves alternate between the even blocks with the output side (norm, head), and the odd blocks with the input side
    (embeddings). In a model without numbered blocks, each half is every other layer.
    """

    fresh: Annotated[
        Literal["even", "odd"] | None,
        Setting("the half that a full base, or a first save, supplies", default="even"),
    ] = None
    """
    The half that a composite's base supplies if the base is a full save, or the half due at a run's first save; by
    default the even one. A base that was itself saved by parity supplies the half that it saved.
    """
    _shift: int = 0
    """Added to the save's number; set by ``anchored``."""

    name = "parity"
    composed = "half of the layers from REF, the other half from the previous save"
    by_number: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """The settings, as a record keeps them."""
        return {} if self.fresh is None else {"fresh": self.fresh}

    def anchored(self, number: int, saved: frozenset[str] | None = None) -> Self:
        """Return the policy under which save *number* takes the half in *saved*; the fresh half if *saved* is None."""
        fresh = self.fresh or "even"
        if saved is not None:
            halves = Counter((block_index(block) or 0) % 2 for block in anatomy(tuple(saved)).blocks)
            fresh = "odd" if halves[1] > halves[0] else "even"
        return type(self)(fresh=self.fresh, _shift=(number + (fresh == "odd")) % 2)

    def due(self, save: Save) -> frozenset[str]:
        """Return the even blocks and the output side, or the odd ones and the input side, in turns."""
        remainder = (save.number + self._shift) % 2
        parts = anatomy(save.layers)
        if not parts.blocks:  # in a model without numbered blocks, layers take turns
            return frozenset(save.layers[remainder::2])
        blocks = {block for block in parts.blocks if (block_index(block) or 0) % 2 == remainder}
        return frozenset(blocks.union(parts.input_side if remainder else parts.output_side))
