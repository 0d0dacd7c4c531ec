"""Exchanges of ranks without processes."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from layerstore.live.ranks import Exchange


class Together:
    """The exchanges of ranks that run as threads."""

    def __init__(self, world_size: int) -> None:
        """Expect so many."""
        self._sent: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=60)

    def of(self, rank: int) -> Exchange:
        """Return the exchange that *rank* uses."""
        return _OfThread(self, rank, len(self._sent))

    def gathered(self, rank: int, mine: Any) -> list[Any]:
        """Return what all ranks have sent, of which *mine* is of *rank*."""
        self._sent[rank] = mine
        self._barrier.wait()
        found = list(self._sent)
        self._barrier.wait()
        return found


class _OfThread(Exchange):
    def __init__(self, together: Together, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._together = together

    def _gathered(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._together.gathered(self.rank, mine)

    def _dealt(self, mine: torch.Tensor, dealt: torch.Tensor, sizes: list[int], sizes_dealt: list[int]) -> torch.Tensor:
        parts = self._together.gathered(self.rank, torch.split(mine, sizes))
        return torch.cat([of_rank[self.rank] for of_rank in parts], out=dealt)


class InTurn(Exchange):
    """
    The exchange of ranks that take turns to send, after which each hears what all have sent.

    Whoever uses it sets *rank*, and *hears* once all have sent.
    """

    def __init__(self, size: int) -> None:
        """Begin with the first, who sends."""
        self.rank, self.size, self._is_alone = 0, size, True
        self.sent: dict[int, Sequence[bytes]] = {}
        self.hears = False

    def deal(self, messages: Sequence[bytes]) -> list[bytes]:
        """Keep *messages*, or return what was sent to the rank."""
        if self.hears:
            return [of_rank[self.rank] for of_rank in self.sent.values()]
        self.sent[self.rank] = messages
        return []
