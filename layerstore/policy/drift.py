"""
``drift``: the layers that moved most since they were last saved, within a budget; none gets older than a bound.

Under a bare threshold all layers become due together, then none; under a bare bound, nearly all at one save. So the
worst go first, and old layers are renewed in turns before they all have to be.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from layerstore.errors import InvalidInput
from layerstore.policy.due import Save
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True)
class Drift:
    """Layers by how far their masters have moved."""

    threshold: float = 0.01
    """A layer is due if it has moved by more than this share of its length."""
    budget: int | None = None
    """Bytes that a save may take, on average if a layer is larger than this; None for no limit."""
    stalest: int = 10
    """No layer gets older than this many saves, whatever the budget."""

    name: ClassVar[str] = "drift"
    by_number: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise InvalidInput(
                f"drift has no threshold {self.threshold}", hint="a share of a layer's length, like 0.01"
            )
        if self.budget is not None and self.budget <= 0:
            raise InvalidInput(f"drift cannot save {self.budget} bytes", hint="a budget is above 0, or left out")
        if self.stalest < 1:
            raise InvalidInput(f"drift cannot keep layers {self.stalest} saves old", hint="stalest is 1 or more")

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings."""
        return {"threshold": self.threshold, "budget": self.budget, "stalest": self.stalest}

    def due(self, save: Save) -> frozenset[str]:
        """Return what is old, and of the rest what moved most."""
        if not save.movements:
            return frozenset(save.layers)  # nothing was measured: a full save
        chosen = {layer for index, layer in enumerate(save.layers) if self._is_old(save, layer, index)}
        spent = sum(save.sizes.get(layer, 0) for layer in chosen)
        for layer in sorted(save.layers, key=lambda layer: -_movement(save, layer)):
            if layer in chosen or not _movement(save, layer) > self.threshold:
                continue
            size = save.sizes.get(layer, 0)
            if not self._affords(save, size, spent=spent):
                break  # else small layers, which always fit, would use up what a large one waits for
            chosen.add(layer)
            spent += size
        return frozenset(chosen)

    def _is_old(self, save: Save, layer: str, index: int) -> bool:
        if save.ages.get(layer, 0) >= self.stalest or (layer not in save.ages and layer not in save.movements):
            return True
        # By turns, so that they do not all reach the bound at one save.
        return save.number % self.stalest == index % self.stalest

    def _affords(self, save: Save, size: int, *, spent: int) -> bool:
        """
        Whether *size* bytes fit in the budget of *save*, of which *spent* are used.

        A layer larger than the budget draws on the budgets of the saves just before, less all that was saved at them.
        """
        if self.budget is None or not size or spent + size <= self.budget:
            return True
        saves = -(-size // self.budget)
        if saves == 1:
            return False
        before = sum(save.sizes.get(layer, 0) for layer, age in save.ages.items() if age < saves)
        return before + spent + size <= self.budget * saves


def _movement(save: Save, layer: str) -> float:
    """Return how far *layer* has moved; infinity if that is not known, or not a number."""
    found = save.movements.get(layer, math.inf)
    return math.inf if math.isnan(found) else found
