"""
Courtesy locks: they save double work and tell who is busy.

No promise rests on them (docs/internals/durability.md): exclusive links decide what is committed.
On a disk of this host they are flocks, which free themselves when their holder dies: there are no stale ones to clean.
On a network filesystem flock may reach no other host, so there they are leases (``lease.py``).
"""

import contextlib
import errno as errnos
import fcntl
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from layerstore.errors import InvalidInput, Locked
from layerstore.limits import LEASE_RENEWED_SECONDS, LEASE_SECONDS, LOCK_DEADLINE_SECONDS
from layerstore.storage.files import network_filesystem
from layerstore.storage.handles import mapped_errors

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


_POLL_SECONDS = 0.25


@contextlib.contextmanager
def lease(patience: Patience) -> Iterator[Hold]:
    """
    Hold a lease on the lock file of *patience* while the body runs.

    Raises:
        Locked: Somebody else's was still good at the deadline.
    """
    held = _Lease(patience, *_acquire(patience))
    try:
        yield held
    finally:
        held.end()


class _Lease:
    """A lease of this process, touched by a thread of its own."""

    def __init__(self, patience: Patience, generation: int, fd: int) -> None:
        self._patience = patience
        self._fd = fd  # as long as it is open, no other file is this one
        self._generation = generation
        self._path = _file(patience.path, generation)
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._lost: Locked | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease of {patience.path.name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Renew the lease; raise Locked if it is somebody else's by now."""
        with mapped_errors(self._path, doing="renew the lock"):
            self._renew()
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Give the lease up; the next one need not wait."""
        if os.getpid() != self._pid:
            return  # a forked child has the object, not the lease
        self._ending.set()
        self._thread.join()
        os.close(self._fd)
        # It stays as the highest generation: numbers only grow. One that cannot be given up runs out.
        with contextlib.suppress(OSError):
            if self._lost is None:
                os.utime(self._path, ns=(0, 0), follow_symlinks=False)

    def _keep(self) -> None:
        while not self._ending.wait(LEASE_RENEWED_SECONDS) and self._lost is None:
            # What cannot be renewed runs out; whoever holds it hears of it from `check`.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        # First touch, then look: whoever takes the lease looks at ours after having made the next one.
        with self._guard:
            try:
                is_there = os.path.samestat(os.fstat(self._fd), self._path.lstat())
                os.utime(self._path, follow_symlinks=False)
            except FileNotFoundError:  # a later holder has tidied up
                is_there = False
            newest = _newest(self._patience.path)
            if self._lost is None and not (is_there and newest == self._generation):
                successor = _file(self._patience.path, newest)
                self._lost = lost(self._patience.what, self._path, to=holder_in(successor))


# -- taking one ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sight:
    """One look at a lease."""

    identity: tuple[int, int, int]
    """Which file it is, and when it was last touched: any sign of life changes it."""
    modified_ns: int


@dataclass(slots=True)
class _Watch:
    """How long a lease was seen unchanged, by the clock of whoever looks."""

    sight: _Sight | None = None
    since: float = 0.0

    def has_run_out(self, sight: _Sight, *, now_ns: int) -> bool:
        """Whether nobody keeps the lease *sight*; *now_ns* is the filesystem's own time."""
        if sight != self.sight:
            self.sight, self.since = sight, time.monotonic()
        is_old = now_ns - sight.modified_ns > LEASE_SECONDS * 1e9
        return is_old or time.monotonic() - self.since > LEASE_SECONDS


def _acquire(patience: Patience) -> tuple[int, int]:
    """Make the next generation, once the last one has run out; return its number and its file, open."""
    watch = _Watch()
    hint = (
        "wait for it to finish, or set LAYERSTORE_LOCK_TIMEOUT to more seconds; "
        f"if that process is gone, its lock runs out by itself, within {LEASE_SECONDS:g} s"
    )
    while True:
        with mapped_errors(patience.path, doing="lock"):
            now_ns = _now_ns(patience.path)
            newest = _newest(patience.path)
            sight = _look(_file(patience.path, newest))
            is_free = sight is None or watch.has_run_out(sight, now_ns=now_ns)
            fd = _succeed(patience.path, newest, sight) if is_free else None
            if fd is not None:
                _forget_before(patience.path, newest + 1)
                return newest + 1, fd
        patience.wait(_POLL_SECONDS, holder=_file(patience.path, newest), hint=hint)


def _succeed(base: Path, newest: int, sight: _Sight | None) -> int | None:
    """Make the lease after *newest*; return it, open, if it is ours and *newest* is still as it was at *sight*."""
    path = _file(base, newest + 1)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return None
    introduce(fd)
    # The holder may have come back to life after it was looked at, and others may have gone on without us.
    if _look(_file(base, newest)) == sight and _newest(base) == newest + 1:
        return fd
    os.close(fd)
    _discard(path)
    return None


def _forget_before(base: Path, generation: int) -> None:
    for earlier in _generations(base):
        if earlier < generation:
            _discard(_file(base, earlier))


def _discard(path: Path) -> None:
    """Remove a lease that does not count; if it stays, it still does not."""
    with contextlib.suppress(OSError):
        path.unlink()


# -- files ---------------------------------------------------------------------------------------------------------


def _file(base: Path, generation: int) -> Path:
    return base.with_name(f"{base.name}.{generation}")


def _generations(base: Path) -> list[int]:
    heads_and_tails = (path.name.rpartition(".") for path in base.parent.iterdir())
    return [int(tail) for head, _, tail in heads_and_tails if head == base.name and tail.isdecimal() and tail.isascii()]


def _newest(base: Path) -> int:
    return max(_generations(base), default=0)


def _look(path: Path) -> _Sight | None:
    try:
        state = path.lstat()
    except FileNotFoundError:
        return None
    return _Sight((state.st_dev, state.st_ino, state.st_mtime_ns), state.st_mtime_ns)


def _now_ns(base: Path) -> int:
    """Return the time by the filesystem's clock: that of the lock file itself, touched."""
    fd = os.open(base, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.utime(fd)
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


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
