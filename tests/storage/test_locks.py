"""Promises of the courtesy locks: one holder at a time, a deadline, and a message that says who is busy."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from layerstore.disk import lock
from layerstore.errors import Locked, StorageIO

HOLD = """
import sys, time
from pathlib import Path
from layerstore.disk.locks import lock
with lock(Path(sys.argv[1]), what="it", deadline_seconds=1):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.fault(47)
def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    """At its deadline, not before, the second gets an error that names process, host, time and command."""
    path = tmp_path / "lock"
    with lock(path, what="run 'sft'", deadline_seconds=0):
        started = time.monotonic()
        with (
            pytest.raises(
                Locked, match=rf"run 'sft' is locked by pid {os.getpid()} on .* since 20.*; waited 0\.2 s"
            ) as caught,
            lock(path, what="run 'sft'", deadline_seconds=0.2),
        ):
            pass

    assert time.monotonic() - started >= 0.2
    assert caught.value.exit_code == 11
    assert "LAYERSTORE_LOCK_TIMEOUT" in (caught.value.hint or "")


def test_waiting_pays(tmp_path: Path) -> None:
    """Whoever waits gets the lock as soon as it is free."""
    path = tmp_path / "lock"
    release = threading.Event()
    held = threading.Event()

    def hold() -> None:
        with lock(path, what="it", deadline_seconds=0):
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    threading.Timer(0.1, release.set).start()

    with lock(path, what="it", deadline_seconds=30):
        assert release.is_set()
    holder.join()


@pytest.mark.fault(7, 55)
def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """The lock of a process that was killed is free at once, whatever its text says."""
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(Locked, match=f"pid {process.pid}"), lock(path, what="it", deadline_seconds=0):
            pass
        process.kill()
        process.wait()

    with lock(path, what="it", deadline_seconds=0):
        pass


def test_a_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A loader of data lives on while its parent has long given the lock back."""
    path = tmp_path / "lock"
    with lock(path, what="it", deadline_seconds=0):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        with lock(path, what="it", deadline_seconds=0):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.fault(55)
@pytest.mark.parametrize("text", [b"", b"[]", b'{"pid": 1}'])
def test_stale_text_is_only_text(tmp_path: Path, text: bytes) -> None:
    """What somebody wrote into the file decides nothing, and cannot break the message."""
    path = tmp_path / "lock"
    path.write_bytes(text)
    with lock(path, what="it", deadline_seconds=0):
        path.write_bytes(text)
        with pytest.raises(Locked, match="locked by another process"), lock(path, what="it", deadline_seconds=0):
            pass


def test_a_planted_link_is_refused(tmp_path: Path) -> None:
    """A lock file that is a link is not followed."""
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(StorageIO), lock(tmp_path / "lock", what="it", deadline_seconds=0):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_whose_file_was_removed_is_lost(tmp_path: Path) -> None:
    """Others lock the new file: the holder learns by whom, before what it cannot take back."""
    path = tmp_path / "lock"
    with lock(path, what="it", deadline_seconds=0) as hold:
        hold.check()
        path.unlink()

        with lock(path, what="it", deadline_seconds=0) as other:
            other.check()
            with pytest.raises(Locked, match=f"the lock of it was lost to pid {os.getpid()} on "):
                hold.check()


def test_without_flock_everybody_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No promise depends on a lock, so a filesystem that has none is not a reason to stop."""

    def absent(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", absent)
    with (
        lock(tmp_path / "lock", what="it", deadline_seconds=0) as first,
        lock(tmp_path / "lock", what="it", deadline_seconds=0) as second,
    ):
        first.check()
        second.check()
