"""
Leases: courtesy locks for filesystems on which flock may reach no other host.

``NAME.lock.GENERATION`` is a lease on ``NAME.lock``. The highest generation is the one that counts, and its holder
touches its file every few seconds. A lease that is not touched any more runs out, and whoever wants it makes the next
generation, which only one can: files are made exclusively. So a dead holder's lease needs nobody who removes it, and
a holder that was suspended finds a higher generation than its own when it looks.

Times are the filesystem's own, and compared with nothing but its own: clocks of hosts do not count. A lease from the
future, after that clock was set back, runs out once it was watched for long enough without being touched.

No promise rests on a lease: a holder may be suspended right after it has looked (docs/adr/0025-locks.md).
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import Locked
from layerstore.limits import LEASE_RENEWED_SECONDS, LEASE_SECONDS
from layerstore.storage.holders import Hold, Patience, holder_in, introduce, lost
from layerstore.storage.kernel import mapped_errors

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
