"""What a saver needs from an engine, and what it gets at a save."""

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
"""The folder that an engine is told to save to; nothing is ever written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One rank's share, and the memory that its paths refer to."""

    share: Share
    bytes_by_layer: Mapping[str, int]
    """What each layer takes on all ranks together, the same on every rank."""
    moments: Mapping[str, int]
    """How many tensors the optimizer keeps of each layer on all ranks; for DeepSpeed, whether it keeps any."""
    is_dcp: bool = False
    """Whether the commit is one of ``torch.distributed.checkpoint``."""
    undivided: str = ""
    """What the optimizer keeps that cannot be cut into layers; empty if nothing."""
    model: Memory
    optimizer: Memory
    changed: Callable[[], str] = field(default=str)
    """Returns the name of what has changed before it was copied, and must not have; empty if nothing has."""

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
        """Return a key that changes with *source*: its parts, their addresses, and torch's count of changes to each."""
        return source, tuple(self.memory(part.path).mark_of(part.path) for part in source.slices)


class Engine(Protocol):
    """
    What a saver needs from the engine that it saves. `live.deepspeed.ZeroEngine` is DeepSpeed's.

    An engine that makes saves of its own hands them to ``Saver.take``.
    """

    @property
    def rank(self) -> int:
        """This rank among those that share the optimizer's state."""

    @property
    def shard(self) -> int | None:
        """The only shard of each layer that this rank writes; None if it may write any."""

    @property
    def own_keys(self) -> frozenset[str]:
        """The keys that the engine itself uses where the user's client_state goes."""

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
        """Why updates cannot wait for copies; empty if they can."""

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
        """Return this rank's state as it is now, grouped into layers by *pattern*, its paths below `FOLDER`."""

    def check_splittable(self) -> None:
        """Raise Conflict if the last load has failed half-way."""

    def before_update(self, action: Callable[[], None]) -> Callable[[], None]:
        """Call *action* before each update of the optimizer; return a function that stops that."""
