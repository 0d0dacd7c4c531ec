"""The interface between a saver and an engine."""

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from layerstore.live.engine.inert import Memory
from layerstore.zero3 import ObjectSource, Share

if TYPE_CHECKING:
    import torch

FOLDER = Path("live")
"""The folder that an engine is asked to save to; nothing is ever written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One rank's share of a save, and the memory that its paths refer to."""

    share: Share
    bytes_by_layer: Mapping[str, int]
    """The size of each layer on all ranks together, the same on every rank."""
    moments: Mapping[str, int]
    """How many tensors the optimizer keeps for each layer on all ranks; for DeepSpeed, whether it keeps any."""
    is_dcp: bool = False
    """Whether the commit has the form of ``torch.distributed.checkpoint``."""
    undivided: str = ""
    """The names of optimizer state that cannot be split by layer; empty if all state can."""
    model: Memory
    optimizer: Memory
    changed: Callable[[], str] = field(default=str)
    """Returns the name of a tensor that was changed before it was copied; empty if none was."""

    def memory(self, path: Path) -> Memory:
        """Return the memory that holds *path*."""
        return self.model if self.model.holds(path) else self.optimizer

    @property
    def trained(self) -> frozenset[str]:
        """The layers that are not frozen."""
        return frozenset(
            layer.layer for layer in self.share.layers if not all(parameter.frozen for parameter in layer.parameters)
        )

    def mark(self, source: ObjectSource) -> Hashable:
        """Return a key that changes with *source*: its slices, their addresses, and torch's counts of changes."""
        return source, tuple(self.memory(part.path).mark_of(part.path) for part in source.slices)


class Engine(Protocol):
    """
    The interface that a saver needs from an engine. `live.deepspeed.ZeroEngine` implements it for DeepSpeed.

    An engine that makes saves of its own passes them to ``Saver.take``.
    """

    @property
    def rank(self) -> int:
        """The number of this rank among the ranks that share the optimizer's state."""

    @property
    def shard(self) -> int | None:
        """The only shard of each layer that this rank writes; None if it may write any."""

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys that the engine itself uses in the user's client_state."""

    @property
    def world_size(self) -> int:
        """The number of ranks that share the optimizer's state."""

    @property
    def device(self) -> "torch.device":
        """The device that the engine computes on."""

    @property
    def step(self) -> int:
        """The engine's own step counter."""

    @property
    def is_at_boundary(self) -> bool:
        """Whether no gradient has been accumulated for an update that is still to come."""

    @property
    def ungated(self) -> str:
        """The reason why updates cannot wait for copies; empty if they can."""

    @property
    def state_bytes(self) -> int:
        """The bytes of this rank's masters and moments."""

    @property
    def scripts(self) -> list[Path]:
        """The scripts that the engine puts next to its shards."""

    def capture(
        self,
        tag: str,
        client_state: Mapping[str, object],
        *,
        pattern: re.Pattern[str] | None,
        exclude_frozen: bool,
    ) -> Captured:
        """Return this rank's state as it is now, grouped into layers by *pattern*, with paths below `FOLDER`."""

    def check_fully_loaded(self) -> None:
        """Raise Conflict if the last load failed half-way."""

    def before_update(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call *action* before each update of the optimizer; return a function that stops this."""
