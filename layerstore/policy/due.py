"""
What a policy is: which layers are due at a save.

The same answer serves both faces. Asked at a save, it says what to write; asked over a history of saves,
it says which save each layer of a composite comes from (``replay``).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from layerstore.errors import InvalidInput
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save, as a policy sees it."""

    number: int
    """Counted from 0 in the order of saving; the first save of a history is full whatever a policy says."""
    layers: tuple[str, ...]
    """Every layer, in the model's order."""
    ages: Mapping[str, int]
    """How many saves ago each layer was last written; a layer that never was is not in it."""
    movements: Mapping[str, float] = field(default_factory=dict)
    """How far each layer has moved since, relative to its length; empty unless the policy ``measures``."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The bytes that writing each layer takes; likewise."""


@runtime_checkable
class Policy(Protocol):
    """
    Which layers are due at a save: everything that a policy decides.

    A user's own is any object with a name, parameters and this method. One whose answer depends on nothing but the
    save's number may say so with ``by_number = True``: then only the newest saves of a long history are looked at.
    One whose phase follows the save that a composite is based on has a method ``anchored(number, saved)``, which
    returns the policy for that base; *saved* is what it has saved there itself, None where that is a full checkpoint.
    """

    @property
    def name(self) -> str:
        """What records call it."""

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """What records say of its settings: text, numbers and lists."""

    def due(self, save: Save) -> Collection[str]:
        """Return the layers to be written at *save*."""


def due_layers(policy: Policy, save: Save) -> frozenset[str]:
    """Return what *policy* says is due, if it names layers that there are."""
    found = frozenset(policy.due(save))
    strangers = found - set(save.layers)
    if strangers:
        raise InvalidInput(
            f"policy {policy.name!r} says that {min(strangers)!r} is due, which is no layer of this model",
            hint=f"its layers: {', '.join(save.layers[:10])} …",
        )
    return found


def anchored(policy: Policy, number: int, saved: frozenset[str] | None = None) -> Policy:
    """Return *policy* with its phase set by the save *number*, at which it has *saved* those layers, if it has one."""
    anchor = getattr(policy, "anchored", None)
    if anchor is None:
        return policy
    found: Policy = anchor(number, saved)
    return found
