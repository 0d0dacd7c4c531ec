"""What a saver reports of its saves, however many there were."""

import time
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from layerstore.live.saver.results import ERRORS_MAX, CudaHold, Job, LastSave, Saved, Status, hold_training, with_job

MANY = 10 * ERRORS_MAX
SECONDS = 0.05


def job(step: int, *, is_running: bool = False) -> Job:
    """Return the save of *step*; every fourth fails."""
    made_up = SimpleNamespace(
        joint=SimpleNamespace(step=step),
        failure="made up" if step % 4 == 0 and not is_running else "",
        blocked_seconds=0.5,
        durable_seconds=None if is_running else 1.0,
        snapshot=SimpleNamespace(size_bytes=10),
        written_bytes=3,
    )
    return cast(Job, made_up)


def test_a_status_is_of_all_saves_and_of_bounded_size() -> None:
    """A job that saves for weeks needs no more memory than one that saves for an hour."""
    over = reduce(with_job, map(job, range(1, MANY + 1)), Status())
    found = with_job(over, job(MANY + 1, is_running=True))

    assert (found.saved, found.failed, found.queued) == (3 * MANY // 4, MANY // 4, 1)
    assert found.newest_step == MANY - 1
    assert found.blocked_seconds == 0.5 * (MANY + 1)
    assert (found.copied_bytes, found.written_bytes) == (10 * MANY, 3 * MANY)
    assert len(found.errors) == ERRORS_MAX
    assert found.errors[-1] == f"step {MANY}: made up"


def test_a_save_that_was_made_already_says_what_it_does_not_keep(caplog: pytest.LogCaptureFixture) -> None:
    """Trainers save twice at the end, silently; a warning says that another client_state or a pin is not kept."""
    last = LastSave(None)
    first = Saved(step=7, number=0, layers_due=(), skipped=False, blocked_seconds=0.0)
    last.note(first, updates=7)

    assert last.same(7, updates=7, pin=None, has_extras=False, precision="exact") is first
    assert not caplog.records
    assert last.same(7, updates=7, pin="best", has_extras=True, precision="exact") is first
    assert last.same(7, updates=7, pin=None, has_extras=False, precision="delta8") is first

    pin, told, finely = (record.getMessage() for record in caplog.records)
    assert pin == "step 7 was saved already, without a pin; pin it: layerstore pin best RUN@7"
    assert told == "step 7 was saved already; its metrics, client_state and files stay as they are"
    assert finely == "step 7 was saved already, in precision exact: it stays as it is"


def test_a_step_whose_save_was_given_up_may_be_saved_again() -> None:
    """Not one whose save may still become visible, whatever became of others."""
    last = LastSave(None)
    first = Saved(step=7, number=1, layers_due=(), skipped=False, blocked_seconds=0.0)
    last.note(first, updates=7)

    last.note_lost(0)
    assert last.same(7, updates=7, pin=None, has_extras=False, precision="exact") is first
    last.note_lost(1)
    assert last.same(7, updates=7, pin=None, has_extras=False, precision="exact") is None
    again = replace(first, number=2)
    last.note(again, updates=7)
    assert last.same(7, updates=7, pin=None, has_extras=False, precision="exact") is again


def test_a_hold_is_as_long_as_training_stands_still() -> None:
    """Its length can be read while it lasts; after its end it stays the same."""
    with hold_training(torch.device("cpu")) as held:
        time.sleep(SECONDS)
        assert held.seconds >= SECONDS
    found = held.seconds
    time.sleep(SECONDS)

    assert held.seconds == found


def test_while_the_device_works_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's time counts once it has reached the second mark; until then the host's does, and nothing waits."""
    marks: list[Any] = []

    class Mark:
        """An event of a device that is never idle."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.is_reached = False
            marks.append(self)

        def record(self, stream: object) -> None:
            assert stream == "the stream"

        def query(self) -> bool:
            return self.is_reached

        def elapsed_time(self, other: "Mark") -> float:
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
