"""Ranks: programs under torchrun, without any training."""

import os
import time
from pathlib import Path

import pytest

from layerstore.errors import LayerstoreError
from layerstore.live.demo.launch import Event, Ranks

# Like a rank that compiles: its child leads a process group of its own, as ninja's compilers do.
WAITING = """
import subprocess, time
from layerstore.live.demo.launch import tell

tell("rank")
child = subprocess.Popen(["sleep", "600"], process_group=0)
tell("step", number=child.pid, loss="0x1p+0")
time.sleep(600)
"""

FAILING = """
from layerstore.live.demo.launch import tell

tell("step", number=1, loss="0x1p+0")
print("half a line", end="", flush=True)
tell("saved", number=1)
raise ValueError("the reason")
"""


def is_running(pid: int) -> bool:
    """Return whether the process *pid* lives; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ranks_of(program: str, folder: Path, *, count: int) -> Ranks:
    """Return *count* ranks of the Python text *program*."""
    (folder / "program.py").write_text(program)
    return Ranks("program", [], count=count, folder=folder, log=folder / "log")


def test_leaving_early_ends_the_ranks_and_what_they_started(tmp_path: Path) -> None:
    """No process is left after any exception, Ctrl-C included."""
    seen: list[Event] = []

    def hear(ranks: Ranks) -> None:
        for event in ranks.events():
            seen.append(event)
            if len(seen) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ranks_of(WAITING, tmp_path, count=2) as ranks:
        hear(ranks)

    pids = [event.number for event in seen if event.kind in {"rank", "step"}]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []
    assert os.getpid() not in pids


def test_a_failure_names_the_log_and_shows_its_end(tmp_path: Path) -> None:
    """The rank's last lines are shown, without torchrun's report; events survive torn lines."""
    seen: list[Event] = []

    with (
        pytest.raises(LayerstoreError, match="exit status 1") as raised,
        ranks_of(FAILING, tmp_path, count=1) as ranks,
    ):
        seen.extend(ranks.events())

    assert [event.kind for event in seen] == ["step", "saved"]
    tail = raised.value.facts["tail"]
    assert isinstance(tail, list)
    assert tail[-1] == "ValueError: the reason"
    assert str(tmp_path / "log") in str(raised.value)
