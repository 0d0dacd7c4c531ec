"""
Messages between ranks: one small all-gather on the host, called by the main thread of every rank.

It uses a gloo group of its own, which needs no accelerator and so waits for nothing that the accelerator computes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from layerstore.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    LayerstoreError,
    LayoutMismatch,
    Locked,
    NotFound,
    SourceCheckpoint,
    StorageIO,
    Unsupported,
)

if TYPE_CHECKING:
    import torch

_TEXT_BYTES = 240
_NUMBERS = 8

_KINDS: dict[str, Callable[[str], LayerstoreError]] = {
    **{
        kind.__name__: kind
        for kind in (
            *(Conflict, IntegrityError, InvalidInput, LayoutMismatch),
            *(Locked, NotFound, SourceCheckpoint, Unsupported),
        )
    },
    StorageIO.__name__: partial(StorageIO, errno=None, filename="the store"),
}
"""What a rank raises when another one has raised an error of this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank sends."""

    numbers: tuple[int, ...] = ()
    """At most eight."""
    values: tuple[float, ...] = ()
    """Every rank sends the same number of them."""
    text: str = ""
    """Cut to 240 bytes."""


class Exchange:
    """The process group in which ranks talk about saves."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all(self, message: Message) -> list[Message]:
        """Send *message* to all ranks; return everybody's message, by rank."""
        import torch.distributed as dist

        mine = _packed(message)
        found = [mine.new_empty(len(mine)) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return [_unpacked(data, values=len(message.values)) for data in found]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that may fail on some ranks; if one fails, all raise an error of the same class."""
        problem: Exception | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # the other ranks wait to hear of it; it is raised below
            problem = exc
        texts = self.texts("" if problem is None else f"{type(problem).__name__} {problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                kind, _, words = text.partition(" ")
                raise _KINDS.get(kind, LayerstoreError)(f"rank {rank}: {words}")

    def texts(self, text: str) -> list[str]:
        """Return every rank's *text*, cut to 240 bytes."""
        return [message.text for message in self.all(Message(text=text))]

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


def _packed(message: Message) -> "torch.Tensor":
    import torch

    assert len(message.numbers) <= _NUMBERS, "messages stay small"
    numbers = torch.tensor([*message.numbers, *[0] * (_NUMBERS - len(message.numbers))], dtype=torch.int64)
    values = torch.tensor(message.values, dtype=torch.float64)
    text = message.text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    letters = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.cat([numbers.view(torch.uint8), letters, values.view(torch.uint8)])


def _unpacked(data: "torch.Tensor", *, values: int) -> Message:
    import torch

    head = _NUMBERS * 8
    if len(data) != head + _TEXT_BYTES + values * 8:
        raise IntegrityError("ranks speak of different models")
    text = bytes(data[head : head + _TEXT_BYTES].tolist()).rstrip(b"\0").decode(errors="ignore")
    # Cloned: a view as 8-byte numbers has to begin at a multiple of eight.
    return Message(
        numbers=tuple(data[:head].clone().view(torch.int64).tolist()),
        values=tuple(data[head + _TEXT_BYTES :].clone().view(torch.float64).tolist()),
        text=text,
    )
