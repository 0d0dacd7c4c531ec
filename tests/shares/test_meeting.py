"""Processes that do not meet, strangers that come instead, and a process that dies in the middle of a message."""

import subprocess
import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import pytest

from layerstore import Store
from layerstore.errors import JobLost
from layerstore.shares import meeting, processes
from tests.remote.servers import free_port


def test_a_lead_alone_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it gives up."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(meeting, "_MEETING", timedelta(seconds=2))
    monkeypatch.setattr(processes, "_MEETING_WARNS_AFTER", timedelta(seconds=0.2))

    with (
        pytest.warns(processes.JobNotice, match=rf"waiting for the 2 processes of this job at 127.0.0.1:{port}"),
        pytest.raises(JobLost, match="do not meet at"),
    ):
        processes.Led(count=2)


DIES_ANSWERING = """
import os, socket
from layerstore.shares import processes

connect = socket.create_connection

def after_strangers(address, timeout):
    for words in (b"", b"\\0\\0\\0\\5hello", b"\\x7f\\xff\\xff\\xff"):  # none, no hello, and more than one would be
        with connect(address) as stranger:
            stranger.sendall(words)
    return connect(address, timeout)

socket.create_connection = after_strangers
line = processes._Line(1, 2)
line.listen()
os.write(line._peers[0].fileno(), (1 << 20).to_bytes(4) + b"half")  # of a message of 1 MiB
os._exit(0)
"""


def never_done(repo: object, part: object) -> AbstractContextManager[None]:
    """Stand for some work: the other process dies."""
    raise NotImplementedError


@pytest.mark.full
def test_a_death_in_the_middle_of_an_answer_is_noticed(
    monkeypatch: pytest.MonkeyPatch, store: Store, tmp_path: Path
) -> None:
    """Once they have met, which strangers neither join nor disturb."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    program = tmp_path / "other.py"
    program.write_text(DIES_ANSWERING)
    with subprocess.Popen([sys.executable, str(program)]) as other:
        led = processes.Led(count=2)
        with (
            led.scatter_work(store.repo, never_done, ["part"]) as answers,
            pytest.raises(JobLost, match="another process of this job has ended"),
        ):
            answers()
        assert other.wait(60) == 0
