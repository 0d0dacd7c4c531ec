"""
The host buffer between a running engine and the disk: a ring, filled by one thread and emptied by another.

Bounded, reused, and filled in the order in which it is emptied: so a slice of any size streams through it.
"""

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PoolClosed(Exception):
    """Nobody will empty the ring any more."""


class Pool:
    """A ring of *size_bytes* bytes of the host's memory."""

    def __init__(self, size_bytes: int, *, pinned: bool) -> None:
        import torch

        self.size_bytes = size_bytes
        # Not touched before it is used: an interval that saves little takes little memory.
        self._memory: torch.Tensor = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._given: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """How much waits for the disk."""
        with self._changed:
            return sum(end - begin for begin, end in self._given)

    def take(self, size_bytes: int) -> "torch.Tensor":
        """
        Return *size_bytes* of the ring once they are free.

        Raises:
            PoolClosed: The ring was closed meanwhile.
        """
        assert 0 < size_bytes <= self.size_bytes
        with self._changed:
            while not self._is_closed:
                begin = self._free_at(size_bytes)
                if begin is not None:
                    self._given.append((begin, begin + size_bytes))
                    return self._memory[begin : begin + size_bytes]
                self._changed.wait()
        raise PoolClosed

    def _free_at(self, size_bytes: int) -> int | None:
        """Return where so many bytes are free in one piece, None if nowhere yet."""
        if not self._given:
            return 0
        oldest, newest = self._given[0][0], self._given[-1][1]
        if newest > oldest:  # what is used is one stretch in the middle
            if self.size_bytes - newest >= size_bytes:
                return newest
            return 0 if oldest > size_bytes else None
        return newest if oldest - newest > size_bytes else None

    def give_back(self) -> None:
        """Free what was taken first."""
        with self._changed:
            self._given.popleft()
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
