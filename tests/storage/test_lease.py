"""
Promises of the locks on network filesystems: one holder at a time, no remains to clean, and who lost it is told.

A local folder stands in for the network's, and leases run out in tenths of seconds.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from layerstore.disk import lock, locks
from layerstore.disk.locks import HeldLock
from layerstore.errors import Locked, StorageIO

GOOD_FOR = 1.0
RENEWED = 0.1

HOLD = f"""
import sys
import threading
from pathlib import Path
from layerstore.errors import Locked
from layerstore.disk import locks
locks.LEASE_SECONDS, locks.LEASE_RENEWED_SECONDS = {GOOD_FOR}, {RENEWED}
locks.network_filesystem = lambda path: "nfs4"
with locks.lock(Path(sys.argv[1]), what="it", deadline_seconds=1) as hold:
    print("held", flush=True)
    for line in sys.stdin:
        try:
            hold.check()
            print("still held", flush=True)
        except Locked as exc:
            print(exc, flush=True)
"""


@pytest.fixture(autouse=True)
def _on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every folder be on the network, and time fly."""
    monkeypatch.setattr(locks, "network_filesystem", lambda path: "nfs4")
    monkeypatch.setattr(locks, "LEASE_SECONDS", GOOD_FOR)
    monkeypatch.setattr(locks, "LEASE_RENEWED_SECONDS", RENEWED)
    monkeypatch.setattr(locks, "_LEASE_POLL_SECONDS", 0.02)


@pytest.fixture
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let leases that nobody holds run out sooner."""
    monkeypatch.setattr(locks, "LEASE_SECONDS", 0.2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the lock is."""
    return tmp_path / "gc.lock"


def leases(path: Path) -> list[str]:
    """Return the names of the leases on *path*."""
    return sorted(name for name in os.listdir(path.parent) if name.startswith(f"{path.name}."))


@contextmanager
def taken(path: Path, deadline_seconds: float = 0.0) -> Iterator[HeldLock]:
    """Hold the lock."""
    with lock(path, what="it", deadline_seconds=deadline_seconds) as hold:
        yield hold


def refused(path: Path, deadline_seconds: float = 0.0) -> Locked:
    """Return the error of whoever wants the lock."""
    with pytest.raises(Locked) as caught, taken(path, deadline_seconds):
        pass
    return caught.value


@contextmanager
def elsewhere(path: Path) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """Let another process hold the lock; yield it, and what has it check."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        assert stdout.readline() == "held\n"

        def check() -> str:
            stdin.write("\n")
            stdin.flush()
            return stdout.readline().rstrip("\n")

        try:
            yield process, check
        finally:
            process.kill()


# -- one holder ----------------------------------------------------------------------------------------------------


def test_a_lease_is_free_again_at_once(path: Path) -> None:
    """After the body the next one need not wait; one file stays, however often it was taken."""
    for _ in range(20):
        with taken(path) as hold:
            hold.check()

    assert leases(path) == ["gc.lock.20"]


def test_a_lease_that_is_kept_lives_on(path: Path) -> None:
    """A holder that is busy for twice as long as a lease lasts keeps it."""
    with elsewhere(path) as (_, check):
        assert "pid" in str(refused(path, 2 * GOOD_FOR))
        assert check() == "still held"


def test_many_who_want_it_get_it_one_after_another(path: Path) -> None:
    """Twelve threads and nobody beside another, though each waits for all before it."""
    inside: list[int] = []
    most = []

    def work(number: int) -> None:
        with taken(path, 60) as hold:
            inside.append(number)
            most.append(len(inside))
            hold.check()
            time.sleep(0.01)
            inside.remove(number)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12)))

    assert most == [1] * 12
    assert len(leases(path)) == 1


# -- holders that are gone -----------------------------------------------------------------------------------------


@pytest.mark.fault(55)
def test_a_dead_holders_lease_runs_out(path: Path) -> None:
    """It is respected as long as it is good, and needs nobody who deletes a file."""
    with elsewhere(path) as (process, _):
        process.kill()
        process.wait()
        assert f"pid {process.pid}" in str(refused(path))
        with taken(path, 30):
            pass

    assert leases(path) == ["gc.lock.2"]


@pytest.mark.fault(54)
def test_a_suspended_holder_learns_what_it_lost(path: Path) -> None:
    """Its lease runs out, another takes the lock, and the first is told by whom when it goes on."""
    with elsewhere(path) as (process, check):
        process.send_signal(signal.SIGSTOP)
        with taken(path, 30) as mine:
            process.send_signal(signal.SIGCONT)
            told = check()
            mine.check()

        assert f"the lock of it was lost to pid {os.getpid()} on " in told
        assert "was lost to" in check()  # for good, though the other one is done
        process.kill()
    with taken(path):
        pass


def test_a_holder_that_comes_back_in_time_is_not_robbed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever took the lease for dead looks at it once more after having made the next one, and backs off."""
    monkeypatch.setattr(locks, "LEASE_RENEWED_SECONDS", 60)
    first = path.with_name("gc.lock.1")
    with taken(path) as hold:
        os.utime(first, ns=(0, 0))
        monkeypatch.setattr(locks, "introduce", lambda fd: os.utime(first))

        refused(path)

        assert leases(path) == ["gc.lock.1"]
        hold.check()


@pytest.mark.fault(107)
def test_a_lost_lease_is_noticed_without_being_asked(path: Path) -> None:
    """The thread that renews it stops: it does not fight for what is another's."""
    with taken(path) as hold:
        path.with_name("gc.lock.7").touch()
        while any(thread.name == f"lease of {path.name}" for thread in threading.enumerate()):
            time.sleep(RENEWED)
        path.with_name("gc.lock.7").unlink()

        with pytest.raises(Locked, match="was lost to another process"):
            hold.check()


def test_a_disk_that_does_not_answer_is_an_error_of_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be renewed may be lost: whoever asks before a step that cannot be taken back is told."""
    with taken(path) as hold, monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "utime", fail)
        with pytest.raises(StorageIO, match="cannot renew the lock"):
            hold.check()


def test_a_forked_child_does_not_give_the_lease_up(path: Path) -> None:
    """It has the object and not the thread: the lock stays its parent's."""
    with ExitStack() as stack:
        stack.enter_context(taken(path))
        pid = os.fork()
        if pid == 0:
            stack.close()
            os._exit(0)
        os.waitpid(pid, 0)

        refused(path)


# -- clocks and forgeries ------------------------------------------------------------------------------------------


@pytest.mark.fault(56)
@pytest.mark.parametrize("hours", [-1, 10_000])
def test_the_hosts_clock_does_not_count(path: Path, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """A contender whose clock is wrong takes nobody's lease, and gets a free one."""
    wrong = time.time() + 3600 * hours
    with taken(path):
        monkeypatch.setattr(time, "time", lambda: wrong)
        monkeypatch.setattr(time, "time_ns", lambda: int(wrong * 1e9))
        refused(path, 0.1)
    with taken(path):
        pass


@pytest.mark.usefixtures("sooner")
def test_a_lease_from_the_future_runs_out_too(path: Path) -> None:
    """The filesystem's clock was set back after its holder died: it is young, until it was watched for long enough."""
    with taken(path):
        pass
    later = time.time() + 10 * 365 * 86400
    os.utime(path.with_name("gc.lock.1"), (later, later))

    refused(path)
    with taken(path, 30):
        pass


@pytest.mark.parametrize("text", [b"\xff", b'{"pid": 1, "host": "elsewhere", "since": "2020", "command": "gc"}'])
def test_what_a_lease_says_decides_nothing(path: Path, text: bytes) -> None:
    """Another host's name, a reused pid or noise: it is told, and the file's time alone counts."""
    forged = path.with_name("gc.lock.3")
    forged.write_bytes(text)

    message = str(refused(path))
    os.utime(forged, (0, 0))
    with taken(path):
        assert json.loads(path.with_name("gc.lock.4").read_bytes())["pid"] == os.getpid()

    assert ("pid 1 on elsewhere since 2020 (gc)" if b"gc" in text else "another process") in message


@pytest.mark.usefixtures("sooner")
@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_lease_that_is_no_file_blocks_nobody_for_ever(path: Path, kind: str) -> None:
    """It is not read, not followed, and runs out like any other."""
    forged = path.with_name("gc.lock.5")
    forged.symlink_to("nowhere") if kind == "link" else os.mkfifo(forged)

    assert "another process" in str(refused(path))
    with taken(path, 30):
        pass


def test_a_filesystem_without_flock_gets_leases(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name: it answers that it has none."""

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "network_filesystem", lambda path: None)
    monkeypatch.setattr("fcntl.flock", none)
    with taken(path):
        assert leases(path) == ["gc.lock.1"]
        refused(path)
