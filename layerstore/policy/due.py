"""
The interface of policies, which decide which layers are due at a save; and ``latest``, under which all layers are due.

At a save, the due layers are written. Over a history of saves, each layer of a composite comes from the newest save
at which the layer was due. So a composite made under a policy from full checkpoints has the same versions as one made
under ``latest`` from a history that was saved under that policy.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from layerstore.errors import InvalidInput
from layerstore.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save, as a policy sees it."""

    number: int
    """Counted from 0 in the order of saving; the first save of a history is full, regardless of the policy."""
    layers: tuple[str, ...]
    """Every layer, in the model's order."""
    ages: Mapping[str, int]
    """How many saves ago each layer was last written; layers that were never written are absent."""
    movements: Mapping[str, float] = field(default_factory=dict)
    """
    How far each layer moved since its last save, relative to its norm.

    Empty unless the policy ``measures`` and this is a save, not a replayed history.
    """
    weighted_movements: Mapping[str, float] = field(default_factory=dict)
    """Movements with elements weighted by the size of their gradients, relative to the model; see `Movements`."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The bytes that writing each layer takes; set only when ``movements`` is."""


@runtime_checkable
class Policy(Protocol):
    """
    Which layers are due at a save.

    Your own policy is any object with a name, parameters and the method ``due``. Three attributes are optional:

    - ``by_number = True``: over a history, ``due`` needs no ``ages``. They are then empty, and a composite looks back
      only until every layer has its save. At a save, ``ages`` is filled in nevertheless. For a partial save that the
      policy itself made, ``due`` is not called again: the record lists the layers that were due.
    - ``measures = True``: at a save, ``movements``, ``weighted_movements`` and ``sizes`` are filled in. Over a history
      they are always empty.
    - ``anchored(number, saved)`` returns the policy with its phase set by a composite's base, save *number*; *saved* is
      what the policy itself saved at the base, None for a full checkpoint. At a save, the arguments are 0 and None.
    """

    @property
    def name(self) -> str:
        """The policy's name in records."""

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """The policy's settings, for the record: text, numbers and lists."""

    def due(self, save: Save) -> Collection[str]:
        """Return the layers to write at *save*."""


class OwnPolicy(Policy, Protocol):
    """
    One of our own policies, which can be made without arguments; its fields describe its settings (`Setting`).

    It may have ``small``: settings for a model of few blocks, where the usual settings would save most of the blocks.
    """

    name: str
    composed: str
    """One line of ``compose --help``: where a composite's layers come from."""


@dataclass(frozen=True, slots=True)
class Latest:
    """Every layer is due, so a composite has its base's own layers; the policy's name is ``full``."""

    name = "full"
    composed = "each layer as the commit has it"
    by_number: ClassVar[bool] = True

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Empty: this policy has no settings."""
        return {}

    def due(self, save: Save) -> frozenset[str]:
        """Return every layer."""
        return frozenset(save.layers)


def due_layers(policy: Policy, save: Save) -> frozenset[str]:
    """Return the layers that *policy* makes due; raise InvalidInput if one of them does not exist."""
    due = frozenset(policy.due(save))
    strangers = due - set(save.layers)
    if strangers:
        raise InvalidInput(
            f"policy {policy.name!r} says that {min(strangers)!r} is due, which is not a layer of this model",
            hint=f"its layers: {', '.join(save.layers[:10])} …",
        )
    return due


def anchored(policy: Policy, number: int, saved: frozenset[str] | None = None) -> Policy:
    """Return *policy* with its phase, if it has one, set by the save *number*, at which it saved the layers *saved*."""
    anchor = getattr(policy, "anchored", None)
    if anchor is None:
        return policy
    phased: Policy = anchor(number, saved)
    return phased


# -- over a history ------------------------------------------------------------------------------------------------


class PastSave(Protocol):
    """A past save, from its record."""

    @property
    def save_number(self) -> int:
        """The save's number in its run's history, counted from 0."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Every layer, in the model's order."""

    @property
    def counted(self) -> Sequence[bool]:
        """For every layer, whether the optimizer had counted an update of that layer."""


def replay_policy(
    policy: Policy,
    history: Iterable[PastSave],
    *,
    recorded: Callable[[int], frozenset[str] | None] = lambda _: None,
) -> dict[str, int]:
    """
    Return, for every layer of the base, the position in *history* of the save that it comes from.

    *history* is newest first, begins with the base, and is read no further than needed. A save counts as full if no
    save precedes it, or only saves made before the optimizer's first update. *recorded* returns what this very policy
    saved at a position, or None if the policy must be asked.
    """
    if getattr(policy, "by_number", False):
        return _newest_due(policy, history, recorded)
    return _forward(policy, list(enumerate(history)), recorded)


def _newest_due(
    policy: Policy, history: Iterable[PastSave], recorded: Callable[[int], frozenset[str] | None]
) -> dict[str, int]:
    """Walk back from the base until every layer has its save."""
    newest: dict[str, int] = {}
    waiting: dict[str, int] = {}
    """The layers still to be found, each with the oldest complete save seen."""
    needs_count: set[str] = set()
    for position, save in enumerate(history):
        counted = dict(zip(save.layer_names, save.counted, strict=True))
        if position == 0:
            waiting = dict.fromkeys(save.layer_names, 0)
            needs_count = {layer for layer, is_counted in counted.items() if is_counted}
        # At this save, the layer did not exist or had no update yet: use the oldest complete save seen so far.
        for layer in [layer for layer in waiting if layer not in counted or counted[layer] < (layer in needs_count)]:
            newest[layer] = waiting.pop(layer)
        for layer in waiting:
            waiting[layer] = position
        due = recorded(position)
        if due is None:
            due = due_layers(policy, Save(number=save.save_number, layers=save.layer_names, ages={}))
        for layer in due & waiting.keys():
            newest[layer] = waiting.pop(layer)
        if not waiting:
            break
    return newest | waiting


def _forward(
    policy: Policy, saves: list[tuple[int, PastSave]], recorded: Callable[[int], frozenset[str] | None]
) -> dict[str, int]:
    """Replay a policy that uses ages, starting with the first save."""
    base = saves[0][1]
    needs_count = {layer for layer, is_counted in zip(base.layer_names, base.counted, strict=True) if is_counted}
    newest: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for position, save in reversed(saves):
        number, layers = save.save_number, save.layer_names
        counted = dict(zip(layers, save.counted, strict=True))
        due = recorded(position)
        if due is None:
            ages = {layer: number - numbers[layer] for layer in layers if layer in numbers}
            due = due_layers(policy, Save(number=number, layers=layers, ages=ages))
        # A version from before the optimizer's first update cannot replace a later one.
        for layer in due | {layer for layer in layers if layer not in newest}:
            if counted[layer] >= (layer in needs_count):
                newest[layer], numbers[layer] = position, number
    return {layer: newest[layer] for layer in base.layer_names}
