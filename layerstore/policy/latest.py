"""``latest``, also called ``full``: every layer at every save, so that a composite has its base's own layers."""

from dataclasses import dataclass
from typing import ClassVar

from layerstore.policy.due import Save
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True)
class Latest:
    """Everything is due."""

    name: ClassVar[str] = "full"
    by_number: ClassVar[bool] = True

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """None."""
        return {}

    def due(self, save: Save) -> frozenset[str]:
        """Return every layer."""
        return frozenset(save.layers)
