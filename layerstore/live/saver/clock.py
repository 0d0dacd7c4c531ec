"""
How long training is held up: by the host's clock, or on CUDA by the device's own.

A waiting host holds nothing up as long as its device has work; only the device can tell how long it stood still.
"""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Hold:
    """A stretch of time in which training is held up, beginning now. As a context manager it ends on leaving."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._ended: float | None = None

    def end(self) -> None:
        """Let training go on."""
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (time.monotonic() if self._ended is None else self._ended) - self._begun

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class CudaHold(Hold):
    """The same, between two events on the stream that the engine computes on."""

    def __init__(self, device: "torch.device") -> None:
        super().__init__()
        self._device = device
        self._from = self._mark()
        self._to: torch.cuda.Event | None = None

    def end(self) -> None:
        """Let training go on."""
        self._to = self._mark()
        super().end()

    @property
    def seconds(self) -> float:
        """The stream's time between the events; until it has reached the second one, the host's time."""
        if self._to is None or not self._to.query():  # type: ignore[no-untyped-call]
            return super().seconds
        return float(self._from.elapsed_time(self._to)) / 1e3

    def _mark(self) -> "torch.cuda.Event":
        import torch

        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark


def hold_training(device: "torch.device") -> Hold:
    """Begin a hold of training on *device*."""
    return CudaHold(device) if device.type == "cuda" else Hold()
