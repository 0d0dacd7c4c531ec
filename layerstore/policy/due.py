"""
The interface of policies, which say which layers are due at a save; and ``latest``, under which all are.

At a save, the answer says what to write; over a history of saves, it says which save each layer of a composite comes
from (``replay``).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from layerstore.errors import InvalidInput
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save, as a policy sees it."""

    number: int
    """Counted from 0 in the order of saving; the first save of a history is full, whatever the policy says."""
    layers: tuple[str, ...]
    """Every layer, in the model's order."""
    ages: Mapping[str, int]
    """How many saves ago each layer was last written; layers that were never written are absent."""
    movements: Mapping[str, float] = field(default_factory=dict)
    """How far each layer has moved since, relative to its norm; only at a save, and if the policy ``measures``."""
    weighted_movements: Mapping[str, float] = field(default_factory=dict)
    """The same with every element weighted by the size of its gradients, relative to the model; see `Movements`."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The bytes that writing each layer takes; under the same conditions."""


@runtime_checkable
class Policy(Protocol):
    """
    Which layers are due at a save.

    Your own policy is any object with a name, parameters and this method. Three attributes are optional:

    - ``by_number = True``: over a history, ``due`` needs no ``ages``. They are then empty, and a composite looks back
      only until every layer has its save. At a save, they are filled in nevertheless. For a partial save that the
      policy itself made, ``due`` is not called again: the record says what was due.
    - ``measures = True``: at a save, ``movements``, ``weighted_movements`` and ``sizes`` are filled in. Over a history
      they are always empty.
    - ``anchored(number, saved)`` returns the policy with its phase set by a composite's base; *saved* is what the
      policy itself saved there, None for a full checkpoint. At a save it is called with 0 and None.
    """

    @property
    def name(self) -> str:
        """The name that records use for it."""

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings, for the record: text, numbers and lists."""

    def due(self, save: Save) -> Collection[str]:
        """Return the layers to write at *save*."""


class OwnPolicy(Policy, Protocol):
    """
    A policy of ours, made without arguments; its fields say what its settings are (`Setting`).

    It may have ``small``, its settings for a model of a few blocks, of which the usual ones would take most.
    """

    name: str
    composed: str
    """Which layers a composite has, in a line of ``compose --help``."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Everything, so a composite has its base's own layers; its name is ``full``."""

    name = "full"
    composed = "each layer as the commit has it"
    by_number: ClassVar[bool] = True

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """None."""
        return {}

    def due(self, save: Save) -> frozenset[str]:
        """Return every layer."""
        return frozenset(save.layers)


def due_layers(policy: Policy, save: Save) -> frozenset[str]:
    """Return what *policy* says is due; raise InvalidInput if it names a layer that does not exist."""
    found = frozenset(policy.due(save))
    strangers = found - set(save.layers)
    if strangers:
        raise InvalidInput(
            f"policy {policy.name!r} says that {min(strangers)!r} is due, which is no layer of this model",
            hint=f"its layers: {', '.join(save.layers[:10])} …",
        )
    return found


def anchored(policy: Policy, number: int, saved: frozenset[str] | None = None) -> Policy:
    """Return *policy* with its phase, if any, set by the save *number*, at which it *saved* these layers."""
    anchor = getattr(policy, "anchored", None)
    if anchor is None:
        return policy
    found: Policy = anchor(number, saved)
    return found
