"""The adapter to a module and its optimizers: it counts updates, and implements a saver's `Engine`."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer

from layerstore.live.binding import binding_of
from layerstore.live.engine import Captured
from layerstore.live.module.capture import capture
from layerstore.live.module.held import ModuleState, local
from layerstore.zero3.trees import STEP

_MOMENTS_MAX = 2
"""How many moments Adam keeps per element; assumed for the host buffer, which is made before any moments exist."""


class ModuleEngine(ModuleState):
    """A module and its optimizers as an `Engine`."""

    own_keys: frozenset[str] = frozenset()
    """Empty: the user's client_state is stored separately."""
    shard = None
    """None: any rank that holds a part may write it."""

    def __init__(self, model: object, optimizers: object) -> None:
        """Take *model* and its optimizers, as `ModuleState` does."""
        super().__init__(model, optimizers)
        self.binding = binding_of(self.model)
        self._updates = [_updates_of(optimizer) for optimizer in self.optimizers]

    @property
    def device(self) -> torch.device:
        """The device that the module computes on."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @property
    def step(self) -> int:
        """The step of the commit that the module was filled from, plus the number of updates since."""
        return self._updates[-1].count  # all optimizers update, one after the other: the last one ends the step

    def begin_at(self, step: int) -> None:
        """Count updates from *step* on."""
        for updates in self._updates:
            updates.count = step

    @property
    def is_at_boundary(self) -> bool:
        """Whether no gradient has been accumulated for an update that is still to come."""
        return not any(
            updates.awaits_update(optimizer) for updates, optimizer in zip(self._updates, self.optimizers, strict=True)
        )

    @property
    def ungated(self) -> str:
        """Empty: updates can wait for copies."""
        return ""

    @property
    def state_bytes(self) -> int:
        """The bytes of this rank's masters and moments."""
        return self.bytes_to_write * (1 + _MOMENTS_MAX)

    @property
    def scripts(self) -> list[Path]:
        """Empty: no scripts are kept."""
        return []

    def capture(
        self, tag: str, client_state: Mapping[str, object], *, pattern: re.Pattern[str] | None, exclude_frozen: bool
    ) -> Captured:
        """Return this rank's state as it is now, grouped into layers by *pattern*."""
        del tag
        return capture(self, client_state, step=self.step, pattern=pattern, exclude_frozen=exclude_frozen)

    def check_fully_loaded(self) -> None:
        """Raise Conflict if the last load failed half-way."""
        self.binding.check_fully_loaded()

    def before_update(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call *action* before each update of an optimizer; return a function that stops this."""
        handles = [optimizer.register_step_pre_hook(lambda *_: action()) for optimizer in self.optimizers]

        def stop() -> None:
            for handle in handles:
                handle.remove()

        return stop


@dataclass(slots=True)
class _Updates:
    """The updates of one optimizer, counted since layerstore first saw the optimizer."""

    count: int
    gradients: "dict[int, tuple[ref[torch.Tensor], int]]" = field(default_factory=dict)
    """By param group: one of the gradients, and torch's count of its changes, right after the last update."""

    def note(self, optimizer: Optimizer) -> None:
        """Count an update of *optimizer*."""
        self.count += 1
        self.gradients = {number: (ref(gradient), gradient._version) for number, gradient in _gradients(optimizer)}

    def awaits_update(self, optimizer: Optimizer) -> bool:
        """Whether there are gradients that no update has used yet."""
        return any(
            not self._was_used(number, gradient) and bool(local(gradient).any())
            for number, gradient in _gradients(optimizer)
        )

    def _was_used(self, number: int, gradient: torch.Tensor) -> bool:
        known, version = self.gradients.get(number, (None, 0))
        return known is not None and known() is gradient and version == gradient._version


# By optimizer, not by saver: updates between two savers count, too.
_UPDATES: "WeakKeyDictionary[Optimizer, _Updates]" = WeakKeyDictionary()


def _updates_of(optimizer: Optimizer) -> _Updates:
    known = _UPDATES.get(optimizer)
    if known is None:
        steps = (state[STEP] for state in optimizer.state.values() if STEP in state)
        known = _UPDATES[optimizer] = _Updates(count=int(float(next(steps, 0))))
        optimizer.register_step_post_hook(lambda updated, *_: known.note(updated))
    return known


def _gradients(optimizer: Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield one gradient of each param group; a backward pass changes all gradients, so one is enough."""
    for number, group in enumerate(optimizer.param_groups):
        gradients = (parameter.grad for parameter in group["params"])
        gradient = next((gradient for gradient in gradients if gradient is not None), None)
        if gradient is not None:
            yield number, gradient
