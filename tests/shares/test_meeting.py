"""Processes that do not meet, or meet twice; strangers that come instead; and deaths in the middle of a message."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from layerstore import Store
from layerstore.errors import JobLost
from layerstore.shares import meeting, processes
from layerstore.storage import Repository
from tests.ranks.launch import free_port


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the port where the processes of the test meet."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return port


def test_a_lead_alone_says_that_it_waits(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """After a while, and then gives up."""
    monkeypatch.setattr(meeting, "_MEETING_SECONDS", 2.0)
    monkeypatch.setattr(processes, "_MEETING_WARNS_AFTER_SECONDS", 0.2)

    with (
        pytest.warns(processes.JobNotice, match=rf"waiting for the 2 processes of this job at 127.0.0.1:{port}"),
        pytest.raises(JobLost, match="could not connect to each other at"),
    ):
        processes.Led(count=2)


@pytest.mark.parametrize("text", ["99999", "none"])
def test_a_port_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """MASTER_PORT may be anything."""
    monkeypatch.setenv("MASTER_PORT", text)
    with pytest.raises(JobLost, match=f"could not connect to each other at 127.0.0.1:{text}"):
        processes.Led(count=2)


# -- connections ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_server_serves_one_meeting_after_another(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """As torchrun's does, which outlives the commands of a script: who comes first does not call an earlier lead."""
    from torch._C._distributed_c10d import TCPStore

    monkeypatch.setattr(meeting, "_MEETING_SECONDS", 20.0)
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(meeting.connect_all, number, 3) for number in (1, 2)]
            time.sleep(0.5)
            ends = [each.result(60) for each in [pool.submit(meeting.connect_all, 0, 3), *calls]]
        for number in (1, 2):
            ends[number][0].send(number)
            assert ends[0][number - 1].recv() == number
        for each in [*ends[0], *ends[1], *ends[2]]:
            each.close()
    del server


@pytest.mark.full
def test_strangers_neither_join_nor_hold_anybody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they say nothing, too little, or something else."""
    from torch._C._distributed_c10d import HashStore

    monkeypatch.setattr(meeting, "_HELLO_SECONDS", 0.5)
    place, others = HashStore(), []
    with ThreadPoolExecutor(1) as pool:
        lead = pool.submit(meeting._accept_others, place, "key", 2, time.monotonic() + 60)
        own_port, token = place.get("key").decode().split()
        address = ("127.0.0.1", int(own_port))
        for words in (b"", b"\n", b"x" * 40, b"x" * 4096, f"{token}{2:08}".encode()):
            others.append(socket.create_connection(address))
            others[-1].sendall(words)
        others.append(socket.create_connection(address))
        others[-1].sendall(f"{token}{1:08}".encode())
        [connection] = lead.result(60)
    connection.send("you")
    assert others[-1].recv(1) != b""
    for each in others:
        each.close()
    connection.close()


@pytest.mark.full
def test_a_process_that_does_not_connect_is_named() -> None:
    """With the port that a firewall may close."""
    from torch._C._distributed_c10d import HashStore

    with pytest.raises(TimeoutError, match=r"process 1 has not connected to port \d+"):
        meeting._accept_others(HashStore(), "key", 3, time.monotonic() + 0.1)


# -- deaths --------------------------------------------------------------------------------------------------------

OTHER = """
import os, sys, time
from layerstore.shares import processes

number = int(sys.argv[1])
line = processes._Line(number, 3)
line.listen()
if number == 1:
    os.write(line._peers[0].fileno(), (1 << 20).to_bytes(4) + b"half")  # of a message of 1 MiB
    os._exit(0)
time.sleep(2)
line.answer(processes._Answered(result="done"))
sys.exit(line.listen() is not None)
"""


def never_done(repo: Repository, part: object) -> AbstractContextManager[None]:
    """Stand for some work: the other processes do none."""
    raise NotImplementedError


@pytest.mark.full
def test_a_death_in_the_middle_of_an_answer_is_noticed(store: Store, tmp_path: Path) -> None:
    """Once the others are done: what they work with is not removed before. They are then told to end, as always."""
    program = tmp_path / "other.py"
    program.write_text(OTHER)
    path = os.pathsep.join(sys.path)
    others = [
        subprocess.Popen([sys.executable, str(program), number], env=os.environ | {"PYTHONPATH": path})
        for number in "12"
    ]
    led = processes.Led(count=3)
    began = time.monotonic()
    with (
        led.scatter_work(store.repo, never_done, ["part", "part"]) as answers,
        pytest.raises(JobLost, match=r"another process of this job has ended, or cannot be reached \(process 1: "),
    ):
        answers()
    assert time.monotonic() - began > 1.5
    led.end()
    assert [other.wait(60) for other in others] == [0, 0]
