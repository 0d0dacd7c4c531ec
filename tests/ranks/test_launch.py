"""Ranks under torchrun, without any training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore.errors import LayerstoreError
from tests.ranks.launch import Event, run_ranks

WAITING = """
import os, time
from tests.ranks.launch import tell

tell("here", pid=os.getpid())
time.sleep(600)
"""

FAILING = """
from tests.ranks.launch import tell

tell("step", step=1)
print("half a line", end="", flush=True)
tell("saved")
raise ValueError("the reason")
"""


def launch(program: str, folder: Path, *, count: int, hear: Callable[[Event], object]) -> None:
    """Run the Python text *program* on *count* ranks."""
    (folder / "program.py").write_text(program)
    run_ranks("program", [], count=count, folder=folder, log=folder / "log", hear=hear)


def test_leaving_early_ends_the_ranks(tmp_path: Path) -> None:
    """No rank is left after any exception, Ctrl-C included."""
    seen: list[Event] = []

    def hear(event: Event) -> None:
        seen.append(event)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(WAITING, tmp_path, count=2, hear=hear)

    assert len(seen) == 2
    assert not any(Path(f"/proc/{event['pid']}").exists() for event in seen)


def test_a_failure_names_the_log_and_shows_its_end(tmp_path: Path) -> None:
    """The rank's last lines are shown, without torchrun's report; events survive torn lines."""
    seen: list[Event] = []

    with pytest.raises(LayerstoreError, match="exit status 1") as raised:
        launch(FAILING, tmp_path, count=1, hear=seen.append)

    assert seen == [{"kind": "step", "step": 1}, {"kind": "saved"}]
    tail = raised.value.facts["tail"]
    assert isinstance(tail, list)
    assert tail[-1] == "ValueError: the reason"
    assert str(tmp_path / "log") in str(raised.value)
