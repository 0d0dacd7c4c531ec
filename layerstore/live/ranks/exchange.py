"""
Messages between ranks: one small all-gather on the host, called by the main thread of every rank.

It uses its own gloo group, which does not wait for the accelerator's work.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from layerstore import errors
from layerstore.disk import pauses
from layerstore.errors import LayerstoreError, StorageIO
from layerstore.live.log import LOG

if TYPE_CHECKING:
    import torch

TEXT_BYTES_MAX = 2048

_SILENT_SECONDS_MAX = 60.0

Found = TypeVar("Found")


class Exchange:
    """The process group in which ranks talk about saves."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on every rank; if one fails, all raise an error of the same class."""
        problem: Exception | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # the other ranks wait for our message; raised below
            problem = exc
        texts = self.texts("" if problem is None else f"{type(problem).__name__} {problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise _as_heard(*text.split(" ", 1), rank=rank)

    def texts(self, text: str) -> list[str]:
        """Return every rank's *text*, cut to `TEXT_BYTES_MAX`, by rank."""
        import torch

        data = text.encode()[:TEXT_BYTES_MAX].ljust(TEXT_BYTES_MAX, b"\0")
        found = self._gathered(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [each.numpy().tobytes().rstrip(b"\0").decode(errors="ignore") for each in found]

    def looked(
        self, look: Callable[[], Found], words: Callable[[Found], str], *, may_be_late: bool
    ) -> tuple[Found, list[str]]:
        """
        Return what *look* finds on this rank, and the *words* for what it finds on each rank.

        If they differ and hosts may see changes late (*may_be_late*), all ranks look again for a while.
        """
        again = pauses()
        while True:
            with self.together():
                found = look()
            texts = self.texts(f"{may_be_late:d}{words(found)}")
            said = [text[1:] for text in texts]
            if len(set(said)) == 1 or all(text[0] == "0" for text in texts):
                return found, said
            # Only rank 0 does the timing: with their own clocks, ranks might stop at different times.
            if self.first((next(again, "over") or "") if self.rank == 0 else ""):
                return found, said
            if self.rank == 0:
                LOG.warning("the hosts do not see the same yet, and look again: %s", "; ".join(sorted(set(said))))

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each of *values* over all ranks, bit-identical on every rank."""
        import torch

        found = self._gathered(torch.tensor(values, dtype=torch.float64))
        return [sum(column) for column in zip(*(each.tolist() for each in found), strict=True)]

    def wait(self, wait: Callable[[float], bool], *, until: float = math.inf) -> bool:
        """
        Call *wait* on every rank until it returns True on all of them, or until the time *until* of one; return which.

        Ranks exchange a message every minute: gloo aborts after half an hour of silence, and a first push may take
        longer.
        """
        while True:
            is_done = wait(min(max(until - time.monotonic(), 0), _SILENT_SECONDS_MAX))
            is_late = not is_done and time.monotonic() >= until
            open_, late = self.sums([float(not is_done), float(is_late)])
            if not open_ or late:
                return not open_

    def is_same(self, text: str) -> bool:
        """Whether all ranks sent the same *text*."""
        return len(set(self.texts(text))) == 1

    def first(self, text: str) -> str:
        """Return rank 0's *text*."""
        return self.texts(text)[0]

    def close(self) -> None:
        """Destroy the group."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _gathered(self, mine: "torch.Tensor") -> "list[torch.Tensor]":
        import torch.distributed as dist

        found = [mine.new_empty(len(mine)) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return found


def _as_heard(kind: str, words: str, *, rank: int) -> LayerstoreError:
    """Return the error of class *kind* that another *rank* raised."""
    if kind == StorageIO.__name__:
        return StorageIO(f"rank {rank}: {words}", errno=None, filename="the store")
    found = getattr(errors, kind, LayerstoreError)
    is_ours = isinstance(found, type) and issubclass(found, LayerstoreError)
    return found(f"rank {rank}: {words}") if is_ours else LayerstoreError(f"rank {rank}: {words}")
