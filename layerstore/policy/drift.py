"""
``drift``: what has moved most since it was last saved, within a budget, and nothing older than a bound.

A bare threshold pulses: all layers pass it together and then none does, and a bare bound ends in one save of
nearly everything. So the worst go first, and layers that grow old are renewed in turns before they all must be.
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
    """Length of the movement over the length of the layer, above which it is due."""
    budget: int | None = None
    """Bytes that a save may take; on average, where a layer that is larger has to wait for them. None for no limit."""
    stalest: int = 10
    """No layer becomes more than so many saves old, whatever the budget."""

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
        """Return what has to be renewed, and of the rest what moved most."""
        if not save.movements:
            return frozenset(save.layers)  # saved under no drift: all of it is there
        chosen = {layer for index, layer in enumerate(save.layers) if self._is_old(save, layer, index)}
        spent = sum(save.sizes.get(layer, 0) for layer in chosen)
        for layer in sorted(save.layers, key=lambda layer: -_movement(save, layer)):
            if layer in chosen or not _movement(save, layer) > self.threshold:
                continue
            size = save.sizes.get(layer, 0)
            if not self._affords(save, size, spent=spent):
                break  # else small layers, which always fit, would spend what a large one waits for
            chosen.add(layer)
            spent += size
        return frozenset(chosen)

    def _is_old(self, save: Save, layer: str, index: int) -> bool:
        if save.ages.get(layer, 0) >= self.stalest or (layer not in save.ages and layer not in save.movements):
            return True
        # Each has its turn, one after another, so that they do not all reach the bound at one save.
        return save.number % self.stalest == index % self.stalest

    def _affords(self, save: Save, size: int, *, spent: int) -> bool:
        """
        Whether *size* bytes more may be taken at *save*, of which *spent* are.

        What is larger than the budget is paid for by several saves, this one and those just before it, together with
        all that was saved at them: so that layers do not each save up by themselves, and overspend together.
        """
        if self.budget is None or not size or spent + size <= self.budget:
            return True
        saves = -(-size // self.budget)
        if saves == 1:
            return False
        before = sum(save.sizes.get(layer, 0) for layer, age in save.ages.items() if age < saves)
        return before + spent + size <= self.budget * saves


def _movement(save: Save, layer: str) -> float:
    """Return how far *layer* has moved; what cannot be measured, or is no number any more, is worst of all."""
    found = save.movements.get(layer, math.inf)
    return math.inf if math.isnan(found) else found
