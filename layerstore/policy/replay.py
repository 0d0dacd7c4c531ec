"""
A policy over a history of saves: which save each layer of a composite comes from.

Each layer comes from its newest save at which it was due. So a composite over full checkpoints has the versions
that ``latest`` gives over a history that was saved under the same policy.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layerstore.policy.due import Policy, Save, due_since


class PastSave(Protocol):
    """A save of the past, as its record tells."""

    @property
    def save_number(self) -> int:
        """Its number."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Every layer, in the model's order."""

    @property
    def counted(self) -> Sequence[bool]:
        """Of every layer, whether the optimizer had counted an update of it."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One save of the history, and the numbers of the saves before it that came to nothing."""

    position: int
    save: PastSave
    unseen: Sequence[int]


def _nothing_above(position: int) -> Collection[int]:
    """Tell that no save comes after another one in its attempt."""
    return ()


def _nothing_recorded(position: int) -> None:
    """Tell that no decision is on record."""


def _nothing_resumed(position: int) -> None:
    """Tell that a save is one, and no composite that training went on from."""
    return


def replay(
    policy: Policy,
    history: Iterable[PastSave],
    *,
    above: Callable[[int], Collection[int]] = _nothing_above,
    recorded: Callable[[int], frozenset[str] | None] = _nothing_recorded,
    resumed: Callable[[int], Mapping[str, int] | None] = _nothing_resumed,
) -> dict[str, int]:
    """
    Return for every layer of the base, the first of *history*, the position of the save that it comes from.

    *history* is newest first, and read no further than needed. A save is full where nothing complete lies before it:
    with nothing at all before it, or only saves from before the optimizer's first update.
    *above* returns the numbers of the saves that come after the one of a position, in its attempt: a step that was
    filled in later has a larger number than those.
    *recorded* returns what the policy has decided at the save of a position, for policies that go by their records.
    *resumed* returns, where a position is no save but a composite that training went on from, the numbers of the saves
    that its layers come from, as far as they are this run's: it is from these that layers age.
    """
    steps = _with_gaps(history, above)
    if getattr(policy, "by_number", False):
        return _newest_due(policy, steps, recorded)
    return _forward(policy, list(steps), resumed)


def _with_gaps(history: Iterable[PastSave], above: Callable[[int], Collection[int]]) -> Iterator[_Step]:
    """Yield every save with the numbers that are missing between it and the one before."""
    current: _Step | None = None
    for position, save in enumerate(history):
        if current is not None:
            before, number = save.save_number, current.save.save_number
            unseen = missing_between(before, number, above(current.position)) if number > before + 1 else ()
            yield _Step(current.position, current.save, unseen)
        current = _Step(position, save, ())
    if current is not None:
        yield current


def missing_between(before: int, number: int, above: Collection[int]) -> tuple[int, ...]:
    """
    Return the numbers of the saves between two neighbours that came to nothing.

    >>> missing_between(2, 6, above={4})
    (3, 5)
    """
    return tuple(between for between in range(before + 1, number) if between not in above)


def _newest_due(
    policy: Policy, steps: Iterator[_Step], recorded: Callable[[int], frozenset[str] | None]
) -> dict[str, int]:
    """Walk back from the base until every layer has its save."""
    found: dict[str, int] = {}
    waiting: dict[str, int] = {}
    """Layers still to be found, with the oldest complete save seen."""
    needs_count: set[str] = set()
    for step in steps:
        counted = dict(zip(step.save.layer_names, step.save.counted, strict=True))
        if step.position == 0:
            waiting = dict.fromkeys(step.save.layer_names, 0)
            needs_count = {layer for layer, is_counted in counted.items() if is_counted}
        for layer in [layer for layer in waiting if layer not in counted or counted[layer] < (layer in needs_count)]:
            found[layer] = waiting.pop(layer)
        for layer in waiting:
            waiting[layer] = step.position
        decided = recorded(step.position) if getattr(policy, "by_record", False) else None
        save = Save(number=step.save.save_number, layers=step.save.layer_names, ages={}, recorded=decided)
        for layer in due_since(policy, save, unseen=step.unseen) & waiting.keys():
            found[layer] = waiting.pop(layer)
        if not waiting:
            break
    return found | waiting


def _forward(policy: Policy, steps: list[_Step], resumed: Callable[[int], Mapping[str, int] | None]) -> dict[str, int]:
    """Ask a policy that looks at ages, from the first save on."""
    base = steps[0].save
    needs_count = {layer for layer, is_counted in zip(base.layer_names, base.counted, strict=True) if is_counted}
    found: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for step in reversed(steps):
        number, layers = step.save.save_number, step.save.layer_names
        counted = dict(zip(layers, step.save.counted, strict=True))
        origins = resumed(step.position)
        if origins is not None:
            found = {layer: step.position for layer in layers if counted[layer] >= (layer in needs_count)}
            numbers = {layer: number for layer, number in origins.items() if layer in found}
            continue
        save = Save(
            number=number,
            layers=layers,
            ages={layer: number - numbers[layer] for layer in layers if layer in numbers},
        )
        # What was saved before the optimizer's first update is no base for what comes after.
        full = {layer for layer in layers if layer not in found}
        for layer in due_since(policy, save, unseen=step.unseen) | full:
            if counted[layer] >= (layer in needs_count):
                found[layer], numbers[layer] = step.position, number
    return {layer: found[layer] for layer in base.layer_names}
