"""
Who holds a lock, in words, and whoever waits for it.

The words are for people and decide nothing: a process id may be reused, and anybody may write into the file.
"""

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from layerstore.errors import Locked

# Longer texts are cut: they are for people.
_HOLDER_BYTES_MAX = 4096


class Hold(Protocol):
    """A lock that somebody has."""

    def check(self) -> None:
        """
        Make sure that nobody else has it by now: ask before a step that cannot be taken back.

        Raises:
            Locked: It is lost.
        """


def introduce(fd: int) -> None:
    """Write into the file *fd* who we are."""
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


def holder_in(path: Path) -> str:
    """Return who the file *path* says its holder is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            holder = json.loads(os.pread(fd, _HOLDER_BYTES_MAX, 0))
        finally:
            os.close(fd)
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def lost(what: str, path: Path, *, to: str) -> Locked:
    """Return the error for a holder of *what* that finds another one in its place."""
    return Locked(
        f"the lock of {what} was lost to {to}: this process was suspended, or its disk did not answer",
        hint="repeat the command",
        path=str(path),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long somebody waits for a lock."""

    what: str
    path: Path
    deadline_seconds: float
    started: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float, *, holder: Path, hint: str) -> None:
        """
        Wait for *seconds*, or what is left of the time.

        Raises:
            Locked: None is left; the message says who the holder is, according to the file *holder*.
        """
        left = self.started + self.deadline_seconds - time.monotonic()
        if left <= 0:
            waited = f"; waited {self.deadline_seconds:g} s" if self.deadline_seconds else ""
            raise Locked(
                f"{self.what} is locked by {holder_in(holder)}{waited}",
                hint=hint,
                path=str(self.path),
            )
        time.sleep(min(seconds, left))
