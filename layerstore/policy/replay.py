"""
A policy over a history of saves: each layer of a composite comes from the newest save at which it was due.

So a composite over full checkpoints has the same versions as ``latest`` over a history saved under the policy.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from layerstore.policy.due import Policy, Save, due_layers


class PastSave(Protocol):
    """A past save, from its record."""

    @property
    def save_number(self) -> int:
        """Its number."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Every layer, in the model's order."""

    @property
    def counted(self) -> Sequence[bool]:
        """For every layer, whether the optimizer had counted an update of it."""


def replay_policy(
    policy: Policy,
    history: Iterable[PastSave],
    *,
    recorded: Callable[[int], frozenset[str] | None] = lambda _: None,
) -> dict[str, int]:
    """
    Return, for every layer of the base, the position in *history* of the save that it comes from.

    *history* is newest first, begins with the base, and is read no further than needed. A save is full if nothing
    complete precedes it: nothing at all, or only saves from before the optimizer's first update. *recorded* returns
    what exactly this policy saved at a position, or None if the policy must be asked.
    """
    if getattr(policy, "by_number", False):
        return _newest_due(policy, history, recorded)
    return _forward(policy, list(enumerate(history)), recorded)


def _newest_due(
    policy: Policy, history: Iterable[PastSave], recorded: Callable[[int], frozenset[str] | None]
) -> dict[str, int]:
    """Walk back from the base until every layer has its save."""
    found: dict[str, int] = {}
    waiting: dict[str, int] = {}
    """The layers still to be found, each with the oldest complete save seen."""
    needs_count: set[str] = set()
    for position, save in enumerate(history):
        counted = dict(zip(save.layer_names, save.counted, strict=True))
        if position == 0:
            waiting = dict.fromkeys(save.layer_names, 0)
            needs_count = {layer for layer, is_counted in counted.items() if is_counted}
        for layer in [layer for layer in waiting if layer not in counted or counted[layer] < (layer in needs_count)]:
            found[layer] = waiting.pop(layer)
        for layer in waiting:
            waiting[layer] = position
        due = recorded(position)
        if due is None:
            due = due_layers(policy, Save(number=save.save_number, layers=save.layer_names, ages={}))
        for layer in due & waiting.keys():
            found[layer] = waiting.pop(layer)
        if not waiting:
            break
    return found | waiting


def _forward(
    policy: Policy, saves: list[tuple[int, PastSave]], recorded: Callable[[int], frozenset[str] | None]
) -> dict[str, int]:
    """Replay a policy that uses ages, starting with the first save."""
    base = saves[0][1]
    needs_count = {layer for layer, is_counted in zip(base.layer_names, base.counted, strict=True) if is_counted}
    found: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for position, save in reversed(saves):
        number, layers = save.save_number, save.layer_names
        counted = dict(zip(layers, save.counted, strict=True))
        due = recorded(position)
        if due is None:
            ages = {layer: number - numbers[layer] for layer in layers if layer in numbers}
            due = due_layers(policy, Save(number=number, layers=layers, ages=ages))
        # A version from before the optimizer's first update cannot stand in for a later one.
        for layer in due | {layer for layer in layers if layer not in found}:
            if counted[layer] >= (layer in needs_count):
                found[layer], numbers[layer] = position, number
    return {layer: found[layer] for layer in base.layer_names}
