"""
Courtesy locks: they avoid duplicate work and show who is busy.

No promise depends on them (docs/internals/durability.md): exclusive links decide what is committed. On a local disk
they are flocks, which the system releases when their holder dies, so none goes stale. On a network filesystem an flock
may not reach other hosts, so leases are used there: a lease is a file ``NAME.GENERATION`` that its holder keeps
touching, and once it has been untouched for LEASE_SECONDS, anyone may make the next generation.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from layerstore.disk.files import network_filesystem
from layerstore.disk.open_files import mapped_errors
from layerstore.errors import InvalidInput, Locked
from layerstore.json_text import parse_json
from layerstore.limits import LEASE_RENEWED_SECONDS, LEASE_SECONDS, LOCK_DEADLINE_SECONDS
from layerstore.redact import redacted
from layerstore.threads import start

_POLL_SECONDS = 0.05
_LEASE_POLL_SECONDS = 0.25
_HINT = "wait for it to finish, or set LAYERSTORE_LOCK_TIMEOUT to more seconds"
# Errors from filesystems without flock.
_NO_FLOCK = {errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.ENOLCK}
# Longer texts are cut; they are only for people.
_HOLDER_BYTES_MAX = 4096


class HeldLock(Protocol):
    """A lock that somebody holds."""

    def check(self) -> None:
        """
        Make sure that we still hold the lock; call it before an irreversible step.

        Raises:
            Locked: We have lost it.
        """


@contextlib.contextmanager
def lock(path: Path, *, what: str, deadline_seconds: float | None = None) -> Iterator[HeldLock]:
    """
    Hold the lock file *path* while the body runs; *what* says in words what is locked.

    Without *deadline_seconds*, wait as long as ``LAYERSTORE_LOCK_TIMEOUT`` says.

    Raises:
        Locked: Another process still held it at the deadline; the message names it.
    """
    if deadline_seconds is None:
        deadline_seconds = _deadline_seconds()
    wanted = _Wanted(what=what, path=path, deadline_seconds=deadline_seconds)
    with contextlib.ExitStack() as stack:
        hold: HeldLock | None = None
        if network_filesystem(path.parent) is None:
            hold = _flocked(wanted, stack)
        yield hold or stack.enter_context(_lease(wanted))


def _deadline_seconds() -> float:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A lock that somebody waits for or holds."""

    what: str
    path: Path
    deadline_seconds: float
    started: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float, *, holder: Path, hint: str) -> None:
        """
        Wait for *seconds*, but not past the deadline.

        Raises:
            Locked: The deadline has passed; the message names the holder that the file *holder* states.
        """
        left = self.started + self.deadline_seconds - time.monotonic()
        if left <= 0:
            waited = f"; waited {self.deadline_seconds:g} s" if self.deadline_seconds else ""
            raise Locked(f"{self.what} is locked by {_holder_in(holder)}{waited}", hint=hint, path=str(self.path))
        time.sleep(min(seconds, left))

    def lost_to(self, holder: Path) -> Locked:
        """Return the error for a lost lock; the file *holder* names its present holder."""
        return Locked(
            f"the lock of {self.what} was lost to {_holder_in(holder)}: this process was suspended, "
            "or its disk did not answer",
            hint="repeat the command",
            path=str(self.path),
        )


def introduce(fd: int) -> None:
    """Write into the file *fd* who we are."""
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
        return "another process"


def _introduced(path: Path) -> Any:
    """Return what `introduce`, or anybody else, has written into *path*; do not trust it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return parse_json(os.pread(fd, _HOLDER_BYTES_MAX, 0))
    finally:
        os.close(fd)


def hosts_seen(folder: Path) -> dict[str, str]:
    """Return the hosts that have held a lock in *folder*, as its files state, with the start of their latest lock."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                holder = _introduced(path)
                host, since = str(holder["host"]), str(holder["since"])
                found[host] = max(found.get(host, ""), since)
    return found


def host_name() -> str:
    """Return this host's name as locks state it."""
    return socket.gethostname()


# -- flocks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Flock:
    """An flock on an open file."""

    wanted: _Wanted
    fd: int

    def check(self) -> None:
        """Raise Locked if the file is no longer in its place: others lock the one that is."""
        if not _is_at(self.fd, self.wanted.path):
            raise self.wanted.lost_to(self.wanted.path)


def _flocked(wanted: _Wanted, stack: contextlib.ExitStack) -> HeldLock | None:
    """Take the flock until *stack* ends; return None if the filesystem has no flock."""
    while True:
        with contextlib.ExitStack() as attempt:
            fd = open_lock_file(wanted.path)
            attempt.callback(os.close, fd)
            is_ours = try_flock(fd, wanted.path)
            if is_ours is None:
                return None
            if is_ours:
                attempt.callback(_unlock, fd, os.getpid())
                if _is_at(fd, wanted.path):  # else somebody removed the file, and a new file is the lock
                    introduce(fd)
                    stack.push(attempt.pop_all())
                    return _Flock(wanted, fd)
        wanted.wait(_POLL_SECONDS, holder=wanted.path, hint=_HINT)


def open_lock_file(path: Path) -> int:
    """Open the lock file *path*, creating it if needed."""
    with mapped_errors(path, doing="open the lock"):
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """
    Hold the short-lived lock file *path* while the body runs, then remove it; waits without a deadline.

    It only avoids duplicate work: without flock, everybody holds it at once.
    """
    while True:
        fd = open_lock_file(path)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, path):
                break
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its holder has removed it
    try:
        yield
    finally:
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
            if exc.errno not in {errnos.EWOULDBLOCK, errnos.EACCES}:
                raise
            return False
    return True


def _unlock(fd: int, pid: int) -> None:
    """Unlock *fd*, locked by the process *pid*; closing is not enough if a forked child has it open too."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # closing the file will have to do
            fcntl.flock(fd, fcntl.LOCK_UN)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


# -- leases --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lease(wanted: _Wanted) -> Iterator[HeldLock]:
    held = _Lease(wanted, *_acquire(wanted))
    try:
        yield held
    finally:
        held.end()


class _Lease:
    """A lease held by this process; a thread keeps it fresh."""

    def __init__(self, wanted: _Wanted, generation: int, fd: int) -> None:
        self._wanted = wanted
        self._fd = fd  # while it is open, no other file can have its inode
        self._generation = generation
        self._path = _file(wanted.path, generation)
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._lost: Locked | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease of {wanted.path.name}", daemon=True)
        start(self._thread)

    def check(self) -> None:
        """Renew the lease; raise Locked if somebody else has taken it."""
        with mapped_errors(self._path, doing="renew the lock"):
            self._renew()
        if self._lost is not None:
            raise self._lost

    def end(self) -> None:
        """Give up the lease, so that the next holder need not wait."""
        if os.getpid() != self._pid:
            return  # a forked child has the object, not the lease
        self._ending.set()
        self._thread.join()
        os.close(self._fd)
        # The file stays, as the highest generation: numbers only grow. If we cannot give the lease up, it expires.
        with contextlib.suppress(OSError):
            if self._lost is None:
                os.utime(self._path, ns=(0, 0), follow_symlinks=False)

    def _keep(self) -> None:
        while not self._ending.wait(LEASE_RENEWED_SECONDS) and self._lost is None:
            # If the lease cannot be renewed, it expires; `check` tells the holder.
            with contextlib.suppress(OSError):
                self._renew()

    def _renew(self) -> None:
        # Touch first, then look: a process that takes over makes the next lease first, then looks at ours.
        with self._guard:
            is_there = _is_at(self._fd, self._path)
            if is_there:
                with contextlib.suppress(FileNotFoundError):  # a later holder has cleaned up
                    os.utime(self._path, follow_symlinks=False)
            newest = _newest(self._wanted.path)
            if self._lost is None and not (is_there and newest == self._generation):
                self._lost = self._wanted.lost_to(_file(self._wanted.path, newest))


def _acquire(wanted: _Wanted) -> tuple[int, int]:
    """Make the next generation once the last one has expired; return its number and its open file."""
    hint = f"{_HINT}; if that process is gone, its lock runs out by itself, within {LEASE_SECONDS:g} s"
    seen: os.stat_result | None = None
    seen_since = 0.0
    while True:
        with mapped_errors(wanted.path, doing="lock"):
            now_ns = _now_ns(wanted.path)
            newest = _newest(wanted.path)
            state = _look(_file(wanted.path, newest))
            # After a clock was set back, a lease may have a future time, so also accept that nobody touched it for
            # long.
            if not _is_unchanged(seen, state):
                seen, seen_since = state, time.monotonic()
            is_free = (
                state is None
                or now_ns - state.st_mtime_ns > LEASE_SECONDS * 1e9
                or time.monotonic() - seen_since > LEASE_SECONDS
            )
            fd = _succeed(wanted.path, newest, state) if is_free else None
            if fd is not None:
                for earlier in _generations(wanted.path):
                    if earlier <= newest:
                        _discard(_file(wanted.path, earlier))
                return newest + 1, fd
        wanted.wait(_LEASE_POLL_SECONDS, holder=_file(wanted.path, newest), hint=hint)


def _succeed(base: Path, newest: int, state: os.stat_result | None) -> int | None:
    """Make the lease after *newest*; return its open file if it is ours and *newest* still has *state*."""
    path = _file(base, newest + 1)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return None
    introduce(fd)
    # Meanwhile the old holder may have renewed its lease, or a third process may have made a later one.
    if _is_unchanged(state, _look(_file(base, newest))) and _newest(base) == newest + 1:
        return fd
    os.close(fd)
    _discard(path)
    return None


def _discard(path: Path) -> None:
    """Remove an invalid lease; it is harmless if it stays."""
    with contextlib.suppress(OSError):
        path.unlink()


def _file(base: Path, generation: int) -> Path:
    return base.with_name(f"{base.name}.{generation}")


def _generations(base: Path) -> list[int]:
    heads_and_tails = (path.name.rpartition(".") for path in base.parent.iterdir())
    return [int(tail) for head, _, tail in heads_and_tails if head == base.name and tail.isdecimal() and tail.isascii()]


def _newest(base: Path) -> int:
    return max(_generations(base), default=0)


def _look(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _is_unchanged(before: os.stat_result | None, now: os.stat_result | None) -> bool:
    """Whether both looks saw the same untouched file, or none."""
    if before is None or now is None:
        return before is now
    return os.path.samestat(before, now) and before.st_mtime_ns == now.st_mtime_ns


def _now_ns(base: Path) -> int:
    """Return the time by the filesystem's clock, from touching the lock file itself."""
    fd = os.open(base, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.utime(fd)
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
