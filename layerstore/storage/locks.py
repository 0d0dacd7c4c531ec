"""
Courtesy locks on one host: they save double work and tell who is busy.

No promise rests on them (docs/reference/format.md, section 6): exclusive links decide what is committed.
flock frees itself when its holder dies, so there are no stale locks to clean.
"""

import contextlib
import errno as errnos
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import Locked
from layerstore.storage.kernel import mapped_errors

_POLL_SECONDS = 0.05
# What says who holds a lock; longer texts are cut, they are for people.
_HOLDER_BYTES_MAX = 4096


@contextlib.contextmanager
def lock(path: Path, *, what: str, deadline_seconds: float) -> Iterator[None]:
    """
    Hold the lock file *path* while the body runs.

    Raises:
        Locked: Another process still held it after *deadline_seconds*; the message names it.
    """
    with mapped_errors(path, doing="open the lock"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        _acquire(fd, path, what, deadline_seconds)
        _introduce(fd)
        yield
    finally:
        os.close(fd)  # which also unlocks


def _acquire(fd: int, path: Path, what: str, deadline_seconds: float) -> None:
    give_up_at = time.monotonic() + deadline_seconds
    while True:
        with mapped_errors(path, doing="lock"):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                if exc.errno not in {errnos.EWOULDBLOCK, errnos.EACCES}:
                    raise
            else:
                return
        if time.monotonic() >= give_up_at:
            raise Locked(
                f"{what} is locked by {_holder(fd)}; waited {deadline_seconds:g} s",
                hint="wait for it to finish, or set LAYERSTORE_LOCK_TIMEOUT to more seconds",
                path=str(path),
            )
        time.sleep(_POLL_SECONDS)


def _introduce(fd: int) -> None:
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(sys.argv)[:200],
    }
    # A full disk must not keep anybody from locking: the text is only for people.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)


def _holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, _HOLDER_BYTES_MAX, 0))
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']})"
    except (ValueError, KeyError, TypeError):
        return "another process"
