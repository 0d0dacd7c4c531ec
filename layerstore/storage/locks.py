"""
Courtesy locks: they save double work and tell who is busy.

No promise rests on them (docs/internals/durability.md): exclusive links decide what is committed.
On a disk of this host they are flocks, which free themselves when their holder dies: there are no stale ones to clean.
On a network filesystem flock may reach no other host, so there they are leases (``lease.py``).
"""

import contextlib
import errno as errnos
import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import InvalidInput
from layerstore.limits import LOCK_DEADLINE_SECONDS
from layerstore.storage.holders import Hold, Patience, holder_in, introduce, lost
from layerstore.storage.kernel import mapped_errors
from layerstore.storage.lease import lease
from layerstore.storage.placement import network_filesystem

_POLL_SECONDS = 0.05
_HINT = "wait for it to finish, or set LAYERSTORE_LOCK_TIMEOUT to more seconds"
# What a filesystem answers that has no flock.
_NO_FLOCK = {errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.ENOLCK}


@contextlib.contextmanager
def lock(path: Path, *, what: str, deadline_seconds: float) -> Iterator[Hold]:
    """
    Hold the lock file *path* while the body runs; *what* is locked, in words.

    Raises:
        Locked: Another process still held it after *deadline_seconds*; the message names it.
    """
    patience = Patience(what=what, path=path, deadline_seconds=deadline_seconds)
    with ExitStack() as stack:
        hold: Hold | None = None
        if network_filesystem(path.parent) is None:
            hold = _flocked(patience, stack)
        yield hold or stack.enter_context(lease(patience))


@dataclass(frozen=True, slots=True)
class _Flock:
    """An flock on an open file."""

    patience: Patience
    fd: int

    def check(self) -> None:
        """Raise Locked if the file is not at its place any more: others lock the one that is."""
        if not _is_at(self.fd, self.patience.path):
            raise lost(self.patience.what, self.patience.path, to=holder_in(self.patience.path))


def _flocked(patience: Patience, stack: ExitStack) -> Hold | None:
    """Take the flock, which is held until *stack* ends; return None where the filesystem has none."""
    while True:
        attempt = ExitStack()
        with attempt:
            fd = open_lock_file(patience.path)
            attempt.callback(os.close, fd)
            is_ours = try_flock(fd, patience.path)
            if is_ours is None:
                return None
            # Whoever removed the file by hand has made another one the lock.
            if is_ours:
                attempt.callback(_unlock, fd, os.getpid())
            if is_ours and _is_at(fd, patience.path):
                introduce(fd)
                stack.push(attempt.pop_all())
                return _Flock(patience, fd)
        patience.wait(_POLL_SECONDS, holder=patience.path, hint=_HINT)


def open_lock_file(path: Path) -> int:
    """Open the lock file *path*, made where there is none."""
    with mapped_errors(path, doing="open the lock"):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def try_flock(fd: int, path: Path) -> bool | None:
    """Take the flock of *fd*, which is open on *path*; return whether it was free, None where there is no flock."""
    with mapped_errors(path, doing="lock"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in _NO_FLOCK:
                return None
            if exc.errno not in {errnos.EWOULDBLOCK, errnos.EACCES}:
                raise
            return False
    return True


def _unlock(fd: int, pid: int) -> None:
    """Unlock *fd*, which the process *pid* has locked: closing it would not while a forked child has it open, too."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # then closing it has to do
            fcntl.flock(fd, fcntl.LOCK_UN)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def deadline_seconds() -> float:
    """Return how long to wait for a lock: ``LAYERSTORE_LOCK_TIMEOUT`` where that is set."""
    text = os.environ.get("LAYERSTORE_LOCK_TIMEOUT")
    if text is None:
        return LOCK_DEADLINE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise InvalidInput(f"LAYERSTORE_LOCK_TIMEOUT is {text!r}, which is no number of seconds", hint="try 60")
    return seconds
