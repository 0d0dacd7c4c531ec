"""
``drift``: save the layers that moved most since their last save, within a budget and with a limit on age.

A movement is weighted by the size of the gradients, to predict how much an old version of the layer costs in quality.

With only a threshold, all layers would become due together, then none; with only an age limit, nearly all at one save.
So the layers that moved most go first, and layers are renewed in turns before they all reach the age limit.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from layerstore.arguments import check_fields, named_fields
from layerstore.errors import InvalidInput
from layerstore.policy.due import Save
from layerstore.setting import Setting
from layerstore.tree import Tree
from layerstore.units import size_in_bytes


@named_fields
@dataclass(frozen=True, slots=True)
class Drift:
    """
    Layers by how far their masters have moved.

    Layers that have moved by more than a threshold since they were last saved, largest movement first, within a budget;
    each layer is also saved in turn, so that none grows older than a bound.
    """

    threshold: Annotated[float, Setting("movement above which a layer is due", metavar="X")] = 0.01
    """A layer is due if it has moved by more than this fraction."""
    budget: Annotated[
        int | None,
        Setting("what a save may take, like 2GB", metavar="SIZE", read=size_in_bytes, default="no limit"),
    ] = None
    """
    The bytes that a save may write; None for no limit. A larger layer waits until previous saves have left enough of
    their budgets, and layers that have moved less wait until that layer is saved.
    """
    stalest: Annotated[int, Setting("no layer older than N saves", metavar="N")] = 10
    """No layer gets older than this many saves, regardless of the budget."""
    by: Annotated[Literal["gradient", "norm"], Setting("what a movement is weighted by")] = "gradient"
    """
    ``gradient`` weights each element's movement by the size of its gradients, relative to the model; ``norm`` measures
    movement relative to the layer's own norm, and is always used if the optimizer keeps no second moments.
    """

    name = "drift"
    composed = "each layer from the newest save that found it had moved"
    by_number: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.threshold >= 0:
            raise InvalidInput(f"invalid drift threshold {self.threshold}", hint="a fraction, like 0.01")
        if self.budget is not None and self.budget <= 0:
            raise InvalidInput(f"drift cannot save {self.budget} bytes", hint="a budget is above 0, or left out")
        if self.stalest < 1:
            raise InvalidInput(f"drift cannot keep layers {self.stalest} saves old", hint="stalest is 1 or more")

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """The settings, as a record keeps them."""
        return {"threshold": self.threshold, "budget": self.budget, "stalest": self.stalest, "by": self.by}

    def due(self, save: Save) -> frozenset[str]:
        """Return the old layers, and those of the rest that moved most."""
        if not save.movements:
            return frozenset(save.layers)  # nothing was measured: a full save
        chosen = {layer for index, layer in enumerate(save.layers) if self._is_old(save, layer, index)}
        spent = sum(save.sizes.get(layer, 0) for layer in chosen)
        moved = {layer: self._movement(save, layer) for layer in save.layers}
        for layer in sorted(save.layers, key=lambda layer: -moved[layer]):
            if layer in chosen or not moved[layer] > self.threshold:
                continue
            size = save.sizes.get(layer, 0)
            if not self._affords(save, size, spent=spent):
                break  # otherwise small layers, which always fit, would use up the budget that a large layer waits for
            chosen.add(layer)
            spent += size
        return frozenset(chosen)

    def _movement(self, save: Save, layer: str) -> float:
        """Return how far *layer* has moved; infinity if the distance is unknown or NaN."""
        weighted = save.weighted_movements if self.by == "gradient" else {}
        movement = (weighted or save.movements).get(layer, math.inf)
        return math.inf if math.isnan(movement) else movement

    def _is_old(self, save: Save, layer: str, index: int) -> bool:
        if save.ages.get(layer, 0) >= self.stalest or (layer not in save.ages and layer not in save.movements):
            return True
        # In turns, so that not all layers reach the limit at one save.
        return save.number % self.stalest == index % self.stalest

    def _affords(self, save: Save, size: int, *, spent: int) -> bool:
        """
        Whether *size* bytes fit in what is left of the budget of *save* after *spent*.

        A layer larger than the budget draws on the budgets of the preceding saves, less everything saved at them.
        """
        if self.budget is None or not size or spent + size <= self.budget:
            return True
        saves = -(-size // self.budget)
        if saves == 1:
            return False
        before = sum(save.sizes.get(layer, 0) for layer, age in save.ages.items() if age < saves)
        return before + spent + size <= self.budget * saves
