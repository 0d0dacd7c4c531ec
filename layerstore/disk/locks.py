"""
Courtesy locks: they avoid duplicate work and show who is busy.

No promise depends on them (docs/internals/durability.md): exclusive links decide what is committed. They are flocks:
the system releases them when their holder dies, so no lock goes stale. On a network filesystem, the mount decides
whether an flock reaches other hosts. If it does not, or if the filesystem lacks flock, two commands may do the same
work.
"""

import contextlib
import errno as errnos
import fcntl
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstore.disk.open_files import mapped_errors
from layerstore.errors import InvalidInput, Locked
from layerstore.json_text import parse_json
from layerstore.limits import LOCK_DEADLINE_SECONDS
from layerstore.redact import redacted

# flock has no deadline of its own, so a waiting process polls.
_POLL_SECONDS = 0.05
_HINT = "wait for it to finish, or set LAYERSTORE_LOCK_TIMEOUT to more seconds"
# Errors from filesystems without flock.
_NO_FLOCK = {errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.ENOLCK}
# Longer texts are cut; they are only for people.
_HOLDER_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLock:
    """A lock that this process holds; where the filesystem has no flock, others may hold it too."""

    what: str
    path: Path
    fd: int

    def check(self) -> None:
        """
        Make sure that we still hold the lock; call it before an irreversible step.

        Raises:
            Locked: The lock file was removed; other processes lock its replacement.
        """
        if not _is_at(self.fd, self.path):
            raise Locked(
                f"the lock of {self.what} was lost to {_holder_in(self.path)}: its file was removed",
                hint="repeat the command",
                path=str(self.path),
            )


@contextlib.contextmanager
def lock(path: Path, *, what: str, deadline_seconds: float | None = None) -> Iterator[HeldLock]:
    """
    Hold the lock file *path* while the body runs; *what* describes the locked thing in messages.

    Without *deadline_seconds*, wait ``LAYERSTORE_LOCK_TIMEOUT`` seconds; if that is not set, the default.

    Raises:
        Locked: Another process still held the lock at the deadline; the message identifies that process.
    """
    if deadline_seconds is None:
        deadline_seconds = _deadline_seconds()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        while (fd := _flocked(path, stack)) is None:
            left = started + deadline_seconds - time.monotonic()
            if left <= 0:
                waited = f"; waited {deadline_seconds:g} s" if deadline_seconds else ""
                raise Locked(f"{what} is locked by {_holder_in(path)}{waited}", hint=_HINT, path=str(path))
            time.sleep(min(_POLL_SECONDS, left))
        yield HeldLock(what=what, path=path, fd=fd)


def _flocked(path: Path, stack: contextlib.ExitStack) -> int | None:
    """Return *path*, open and locked until *stack* ends, or None if another process holds the lock."""
    with contextlib.ExitStack() as attempt:
        fd = open_lock_file(path)
        attempt.callback(os.close, fd)
        # None, from a filesystem without flock, counts as success: the work may be done twice, which harms nothing.
        if try_flock(fd, path) is False:
            return None
        # Registered after os.close, so it runs first: once closed, the descriptor may belong to another file.
        attempt.callback(_unlock, fd, os.getpid())
        if not _is_at(fd, path):  # somebody removed the file; a new file is now the lock
            return None
        _introduce(fd)
        stack.push(attempt.pop_all())
        return fd


def _deadline_seconds() -> float:
    text = os.environ.get("LAYERSTORE_LOCK_TIMEOUT")
    if text is None:
        return LOCK_DEADLINE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan  # refused below, too
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidInput(f"LAYERSTORE_LOCK_TIMEOUT is {text!r}, which is not a number of seconds", hint="try 60")
    return seconds


def _introduce(fd: int) -> None:
    """Write this process's identity into the file *fd*."""
    holder = {
        "pid": os.getpid(),
        "host": host_name(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redacted(" ".join(sys.argv))[:200],
    }
    # A full disk must not prevent locking: the text is only for people.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)


def _holder_in(path: Path) -> str:
    try:
        holder = _introduced(path)
        return f"pid {holder['pid']} on {holder['host']} since {holder['since']} ({holder['command']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # half written, or somebody else's text; the lock is held anyway


def _introduced(path: Path) -> Any:
    """Return the JSON in *path*; it is untrusted, since something other than `_introduce` may have written it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return parse_json(os.pread(fd, _HOLDER_BYTES_MAX, 0))
    finally:
        os.close(fd)


def hosts_seen(folder: Path) -> dict[str, str]:
    """Return each host that has held a lock in *folder*, and when it last took one, according to the lock files."""
    hosts: dict[str, str] = {}
    # Only doctor shows the hosts, so a folder that cannot be listed may yield none.
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # being written, or not a lock of ours
                holder = _introduced(path)
                host, since = str(holder["host"]), str(holder["since"])
                hosts[host] = max(hosts.get(host, ""), since)
    return hosts


def host_name() -> str:
    """Return this host's name, as lock files record it."""
    return socket.gethostname()


def open_lock_file(path: Path) -> int:
    """Open the lock file *path*, creating it if needed."""
    with mapped_errors(path, doing="open the lock"):
        # Writable: NFS emulates flock by locking a byte range, and an exclusive range lock needs write access.
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """
    Hold the short-lived lock file *path* while the body runs, then remove it; waits without a deadline.

    The lock only avoids duplicate work: on a filesystem without flock, all processes hold it at once.
    """
    while True:
        fd = open_lock_file(path)
        try:
            # Without flock, the work is done twice rather than not at all.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the previous holder has removed the file
    try:
        yield
    finally:
        # Remove the file before unlocking it: a waiting process then finds it gone, and locks a new file.
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        os.close(fd)


def try_flock(fd: int, path: Path) -> bool | None:
    """Take the flock of *fd*, open on *path*; return whether it was free, None if the filesystem has no flock."""
    with mapped_errors(path, doing="lock"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _NO_FLOCK:
                return None
            if exc.errno not in {errnos.EWOULDBLOCK, errnos.EACCES}:  # EACCES: from NFS, which uses fcntl's locks
                raise
            return False
    return True


def _unlock(fd: int, pid: int) -> None:
    """Unlock *fd* if this process, *pid*, locked it; closing is not enough if a forked child has *fd* open, too."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # if this fails, only closing the file unlocks it
            fcntl.flock(fd, fcntl.LOCK_UN)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False
