"""
What the ranks tell each other: one small all-gather in every `save`, on the host, by the main thread alone.

A group of its own, over gloo: it needs no accelerator, so nothing of what that computes is waited for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
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

_KINDS: dict[str, type[LayerstoreError]] = {
    kind.__name__: kind
    for kind in (
        *(Conflict, IntegrityError, InvalidInput, LayoutMismatch),
        *(Locked, NotFound, SourceCheckpoint, Unsupported),
    )
}
"""What a rank may raise because another one has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What one rank says."""

    numbers: tuple[int, ...] = ()
    """At most eight."""
    values: tuple[float, ...] = ()
    """As many from every rank."""
    text: str = ""
    """Cut where it is too long."""


class Exchange:
    """The ranks of a process group, as far as they talk about saves."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all(self, message: Message) -> list[Message]:
        """Tell everybody *message*; return what everybody says, by rank."""
        import torch.distributed as dist

        mine = _packed(message)
        found = [mine.new_empty(len(mine)) for _ in range(self.size)]
        dist.all_gather(found, mine, group=self._group)
        return [_unpacked(data, values=len(message.values)) for data in found]

    def agree(self, problem: str, error: type[LayerstoreError] | type[TypeError]) -> None:
        """Raise *error* on every rank if any has a *problem*; the first one's words are everybody's."""
        for rank, message in enumerate(self.all(Message(text=problem))):
            if message.text:
                raise error(message.text if self.size == 1 else f"rank {rank}: {message.text}")

    def agree_on_disk(self, problem: str, path: Path) -> None:
        """Raise StorageIO for the store at *path* on every rank if any has a *problem* with it."""
        for rank, text in enumerate(self.texts(problem)):
            if text:
                raise StorageIO(f"rank {rank}: {text}", errno=None, filename=str(path))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do something that may fail on some ranks; then it fails on all, with an error of the same kind."""
        problem: Exception | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001  # whatever it is, the others wait to hear of it; then it is raised
            problem = exc
        texts = self.texts("" if problem is None else f"{type(problem).__name__} {problem}")
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                kind, _, words = text.partition(" ")
                raise _KINDS.get(kind, LayerstoreError)(f"rank {rank}: {words}")

    def texts(self, text: str) -> list[str]:
        """Return what every rank says, cut where it is too long."""
        return [message.text for message in self.all(Message(text=text))]

    def is_same(self, text: str) -> bool:
        """Whether all ranks say the same."""
        return len(set(self.texts(text))) == 1

    def first(self, text: str) -> str:
        """Return the first rank's *text*."""
        return self.all(Message(text=text))[0].text

    def close(self) -> None:
        """Give the group back."""
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
    # Behind the text the place is no multiple of eight any more, which a view of numbers wants.
    return Message(
        numbers=tuple(data[:head].clone().view(torch.int64).tolist()),
        values=tuple(data[head + _TEXT_BYTES :].clone().view(torch.float64).tolist()),
        text=text,
    )
