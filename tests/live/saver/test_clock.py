"""How long training is held, by the host's clock and by a device's."""

import time
from typing import Any

import pytest
import torch

from layerstore.live.saver.clock import CudaHold, hold_training
from tests.live.launched import DEVICES

SECONDS = 0.05


def device_of(name: str) -> torch.device:
    """Return that device; skip where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here: a made-up one stands for it")
    return torch.device(name)


@pytest.mark.parametrize("device", DEVICES)
def test_a_hold_is_as_long_as_training_stands_still(device: str) -> None:
    """It can be asked while it lasts; when it is over it grows no more."""
    with hold_training(device_of(device)) as held:
        time.sleep(SECONDS)
        assert held.seconds >= SECONDS
    if device == "cuda":
        torch.cuda.synchronize()
    found = held.seconds
    time.sleep(SECONDS)

    assert SECONDS * 0.9 <= found == held.seconds


def test_while_the_device_works_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's marks count once it has come to the second one; until then nobody waits for them."""
    marks: list[Any] = []

    class Mark:
        """An event of a device that is never idle."""

        def __init__(self, *, enable_timing: bool) -> None:
            """Be one that tells the time."""
            assert enable_timing
            self.is_reached = False
            marks.append(self)

        def record(self, stream: object) -> None:
            """Be behind all that was begun."""
            assert stream == "the stream"

        def query(self) -> bool:
            """Tell whether the device has come here."""
            return self.is_reached

        def elapsed_time(self, other: "Mark") -> float:
            """Tell the milliseconds up to *other*."""
            assert (self, other) == (marks[0], marks[1])
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    held = hold_training(torch.device("cuda"))
    assert isinstance(held, CudaHold)
    time.sleep(SECONDS)
    held.end()

    assert held.seconds >= SECONDS
    marks[1].is_reached = True
    assert held.seconds == 0.25e-3
