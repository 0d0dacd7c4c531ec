"""Reading, writing and syncing of open files, and kernel calls that Python lacks."""

import contextlib
import ctypes
import errno as errnos
import functools
import logging
import mmap
import os
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from layerstore.errors import IntegrityError, StorageIO
from layerstore.layers import typed
from layerstore.limits import IO_CHUNK_BYTES, LATE_SECONDS, SYNC_AHEAD_BYTES, SYNCING_MAX, SYNCS_AT_ONCE, WRITE_BYTES
from layerstore.threads import Threads

LOG = logging.getLogger("layerstore")

Owner = TypeVar("Owner")
Rest = ParamSpec("Rest")
Answer = TypeVar("Answer")

# A link may lead out of the store, and opening a fifo blocks until somebody opens it for writing.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_LIBC = ctypes.CDLL(None, use_errno=True)
# Constants from Linux's headers that Python does not define.
_AT_CWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = ctypes.c_ulong(0x40049409)
_START = _TO_THE_END = ctypes.c_int64(0)

_AND_REPEAT = "and repeat the command; nothing that was saved before is affected"
_FREE_SPACE = f"free some space {_AND_REPEAT}"
_NO_INODES = f"the filesystem has space, but no inodes left (df -i): remove files {_AND_REPEAT}"
_HINTS = {
    errnos.EROFS: "the filesystem is read-only: it can be read and composed from, but nothing can be written",
    errnos.ENOSPC: _FREE_SPACE,
    errnos.EDQUOT: _FREE_SPACE,
    errnos.EFBIG: "raise the limit on file sizes (ulimit -f) and repeat the command",
    errnos.EMFILE: "raise the limit on open files (ulimit -n) and repeat the command",
    errnos.ENOMEM: "raise the limit on memory (ulimit -v), or end what else uses it, and repeat the command",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The free space that an ordinary user has on a filesystem."""

    total_bytes: int
    free_bytes: int
    free_files: int | None
    """How many more files it can hold; None if there is no limit."""


def room_at(path: Path) -> Room:
    """Return the free space on the filesystem of *path*."""
    state = os.statvfs(path)
    return Room(
        total_bytes=state.f_blocks * state.f_frsize,
        free_bytes=state.f_bavail * state.f_frsize,
        free_files=state.f_favail if state.f_files else None,
    )


class mapped_errors:  # noqa: N801  # used like a function; a generator would slow down every operation
    """Turn an OSError into a StorageIO that states the attempted operation and its path."""

    __slots__ = ("_doing", "_path")

    def __init__(self, path: Path, *, doing: str) -> None:
        self._path = path
        self._doing = doing

    def __enter__(self) -> None:
        """Begin the operation."""

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        # StorageIO is an OSError, too: a StorageIO from an inner operation already states what failed.
        if exc is None or not isinstance(exc, OSError) or isinstance(exc, StorageIO):
            return
        path = self._path
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        if exc.errno == errnos.ELOOP and path.is_symlink():
            reason = "it is a link, which is never followed"
        raise StorageIO(
            f"cannot {self._doing} {path}: {reason}", errno=exc.errno, filename=str(path), hint=_hint(exc.errno, path)
        ) from exc


def _hint(number: int | None, path: Path) -> str | None:
    if number in {errnos.EACCES, errnos.EPERM}:
        return _access_problem(path)
    if number == errnos.ELOOP and path.is_symlink():
        return f"remove {typed(str(path))} by hand, and find out who put it there; it is created again when needed"
    if number == errnos.ENOSPC and _lacks_inodes(path):
        return _NO_INODES
    return None if number is None else _HINTS.get(number)


def _lacks_inodes(path: Path) -> bool:
    """Whether the filesystem of *path* has space, but no inodes left; the system raises ENOSPC for both."""
    with contextlib.suppress(OSError):
        room = room_at(path.parent)
        return room.free_files == 0 and room.free_bytes > 0
    return False


def _access_problem(path: Path) -> str | None:
    """Return a hint on the first of *path* and its parents that this process cannot access; None if there is none."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):  # missing, or below an unreadable folder
            state = place.lstat()
            needed_access = os.R_OK | os.W_OK | (os.X_OK if stat.S_ISDIR(state.st_mode) else 0)
            if not os.access(place, needed_access):
                return (
                    f"{place} belongs to user {state.st_uid} and group {state.st_gid}, with mode "
                    f"{stat.S_IMODE(state.st_mode):04o}; you are user {os.geteuid()}. A store that users share needs "
                    "a common group, setgid folders and umask 002"
                )
    return None


# Most late names appear after a moment; a server that takes longer is polled once a second.
_PAUSE_SECONDS = 0.02
_PAUSE_SECONDS_MAX = 1.0


def hours_on() -> float:
    """Return the seconds of a clock that keeps running while the process is stopped or the machine is asleep."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def pauses() -> Iterator[None]:
    """Yield after each of several growing pauses, `LATE_SECONDS` in all."""
    deadline = time.monotonic() + LATE_SECONDS
    pause = _PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, _PAUSE_SECONDS_MAX)
        yield


def again_while_stale(path: Path, attempt: Callable[[], Answer]) -> Answer:
    """
    Retry *attempt*, which has hit a stale handle, for a while; return its result.

    NFS raises ESTALE for a file that this host has looked up and another host has replaced since.
    """
    LOG.warning("%s: stale file handle; looking it up again for up to %g s", path, LATE_SECONDS)
    for _ in pauses():
        try:
            return attempt()
        except OSError as exc:
            if exc.errno != errnos.ESTALE:
                raise
    return attempt()  # the last attempt: its error goes to the caller


def again_if_stale(
    operation: Callable[Concatenate[Owner, Path, Rest], Answer],
) -> Callable[Concatenate[Owner, Path, Rest], Answer]:
    """Make *operation*, a method that takes a path, retry after a stale handle."""

    @functools.wraps(operation)
    def retrying(owner: Owner, path: Path, /, *args: Rest.args, **options: Rest.kwargs) -> Answer:
        try:
            return operation(owner, path, *args, **options)
        except StorageIO as exc:
            if exc.errno != errnos.ESTALE:
                raise
        return again_while_stale(path, lambda: operation(owner, path, *args, **options))

    return retrying


def rename_exclusive(source: Path, target: Path) -> bool:
    """
    Move *source* to *target* in one step, unless *target* exists; return whether *target* was free.

    Raises:
        OSError: The system's error; EINVAL if the filesystem does not support this.
    """
    if _LIBC.renameat2(_AT_CWD, os.fsencode(source), _AT_CWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errnos.EEXIST:
        return False
    raise OSError(number, os.strerror(number), os.fspath(target))


def allocate(fd: int, size_bytes: int) -> bool:
    """
    Allocate the file *fd* at full size, so that the kernel need not find blocks page by page.

    Return whether that worked. A failure proves nothing: not every filesystem supports it, and on a full disk a copy
    may still share blocks with its source. ``posix_fallocate`` is no alternative: without support from the filesystem,
    it writes to every block.
    """
    return size_bytes > 0 and _LIBC.fallocate(fd, 0, _START, ctypes.c_int64(size_bytes)) == 0


Hook = Callable[[str, Path], None]
"""Called with the operation's name and path before each change on disk."""

# The kernel or filesystem cannot copy between these two files: copy through a buffer instead. EBADF: the source is
# decoded as it is read, and has no descriptor.
_COPY_UNSUPPORTED = {errnos.EXDEV, errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.EINVAL, errnos.EBADF, errnos.EPERM}


def no_hook(operation: str, path: Path) -> None:
    """Do nothing: the hook in production."""


class NewFile:
    """A file being written."""

    def __init__(self, path: Path, fd: int, hook: Hook, *, sync_ahead: bool = False) -> None:
        self.path = path
        self.fd = fd
        self._hook = hook
        self._sync_ahead = sync_ahead
        self._waiting_bytes = 0

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, *, at_once: bool = False) -> None:
        """Write all of *data* at *offset*, *at_once* or in pieces that suit the kernel's cache."""
        self._hook("write", self.path)
        view = memoryview(data).cast("B")
        with mapped_errors(self.path, doing="write"):
            while view:
                count = os.pwrite(self.fd, view if at_once else view[:WRITE_BYTES], offset)
                view, offset = view[count:], offset + count
                self._written(count)

    def copy_from(self, source: "OpenFile", source_offset: int, offset: int, size_bytes: int) -> None:
        """Copy *size_bytes* from *source* inside the kernel, which shares blocks if the filesystem supports it."""
        self._hook("copy", self.path)
        with mapped_errors(self.path, doing="copy to"):
            while size_bytes:
                count = self._copy_some(source, source_offset, offset, size_bytes)
                source_offset, offset, size_bytes = source_offset + count, offset + count, size_bytes - count
                self._written(count)

    def _copy_some(self, source: "OpenFile", source_offset: int, offset: int, size_bytes: int) -> int:
        try:
            # In steps, so that the disk starts writing before everything is copied.
            count = os.copy_file_range(source.fd, self.fd, min(size_bytes, SYNC_AHEAD_BYTES), source_offset, offset)
        except OSError as exc:
            if exc.errno not in _COPY_UNSUPPORTED and exc.errno != errnos.ESTALE:  # ESTALE: reading reopens the source
                raise
            data = source.read_at(source_offset, min(size_bytes, IO_CHUNK_BYTES))
            self.write_at(offset, data)
            return len(data)
        if not count:
            raise source.cut_short(source_offset + size_bytes)
        return count

    def _written(self, size_bytes: int) -> None:
        """Start writeback while the rest is still being written, so that `sync` has little to wait for."""
        self._waiting_bytes += size_bytes
        if self._sync_ahead and self._waiting_bytes >= SYNC_AHEAD_BYTES:
            self.start_writing()

    def start_writing(self) -> None:
        """Start writeback of what has been written; errors surface in the later `sync`."""
        self._waiting_bytes = 0
        # The whole file: the kernel skips pages that are already being written.
        _LIBC.sync_file_range(self.fd, _START, _TO_THE_END, _SYNC_FILE_RANGE_WRITE)

    def clone(self, source: "OpenFile") -> bool:
        """Make this empty file share the blocks of *source*; return whether the filesystem supports it."""
        return bool(_LIBC.ioctl(self.fd, _FICLONE, ctypes.c_int(source.fd)) == 0)

    def set_size(self, size_bytes: int) -> None:
        """Set the file's length; unwritten bytes read as zeros."""
        self._hook("truncate", self.path)
        with mapped_errors(self.path, doing="resize"):
            if not allocate(self.fd, size_bytes):
                os.ftruncate(self.fd, size_bytes)

    def make_executable(self) -> None:
        """Make the file executable for everyone who may read it."""
        with mapped_errors(self.path, doing="change the mode of"):
            mode = os.fstat(self.fd).st_mode
            os.fchmod(self.fd, mode | (mode & 0o444) >> 2)

    def sync(self) -> None:
        """Make the bytes durable; a failed fsync is never repeated, as the kernel may have dropped the pages."""
        self._hook("fsync", self.path)
        with mapped_errors(self.path, doing="fsync"):
            os.fsync(self.fd)

    def close(self) -> None:
        """Close the file; twice is harmless."""
        if self.fd >= 0:
            # Cleared first: by the time of a second close, the number may belong to another file.
            fd, self.fd = self.fd, -1
            with mapped_errors(self.path, doing="close"):
                os.close(fd)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenFile:
    """A regular file open for reading."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = size_bytes
        """The file's size when it was opened."""

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly *size_bytes* from *offset*."""
        data = bytearray(size_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* from *offset*."""
        with mapped_errors(self.path, doing="read"):
            while buffer:
                count = self._read_some(buffer, offset)
                if not count:
                    raise self.cut_short(offset + len(buffer))
                buffer, offset = buffer[count:], offset + count

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.fd, [buffer], offset)
        except OSError as exc:
            if exc.errno != errnos.ESTALE:
                raise
        return again_while_stale(self.path, lambda: os.preadv(self._opened_again(), [buffer], offset))

    def _opened_again(self) -> int:
        """Reopen the file under its current descriptor number, and return that number."""
        fd = os.open(self.path, READ_FLAGS)
        try:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode) or state.st_size != self.size_bytes:
                raise IntegrityError(
                    f"{self.path} was replaced by something else while it was read",
                    hint="repeat the command",
                    path=str(self.path),
                )
            # The number stays, since other threads hold it and may be reading, too.
            os.dup2(fd, self.fd, inheritable=False)
        finally:
            os.close(fd)
        return self.fd

    def map(self) -> mmap.mmap:
        """Map all bytes as read-only memory, which stays valid when the file is closed or removed."""
        with mapped_errors(self.path, doing="map"):
            try:
                if sys.version_info >= (3, 13):  # older versions keep a descriptor for each map
                    return mmap.mmap(self.fd, self.size_bytes, access=mmap.ACCESS_READ, trackfd=False)
                return mmap.mmap(self.fd, self.size_bytes, access=mmap.ACCESS_READ)
            except ValueError as exc:
                # Python's mmap refuses to map beyond the end of the file.
                raise self.cut_short(self.size_bytes) from exc

    def cut_short(self, expected_bytes: int) -> IntegrityError:
        """Return the error for a file that ends before *expected_bytes*."""
        return IntegrityError(
            f"{self.path} is cut short: expected at least {expected_bytes} bytes, found {os.fstat(self.fd).st_size}",
            path=str(self.path),
        )

    def close(self) -> None:
        """Close the file; twice is harmless."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> "OpenFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- syncing in the background -------------------------------------------------------------------------------------

Item = TypeVar("Item")


class Syncing:
    """
    Syncs complete files and folders while their writer continues; unless *durable*, only closes files. Thread-safe.

    An fsync takes a disk a millisecond, and several at once take no longer, so small files are synced together.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._durable = durable
        self._pool = Threads(SYNCS_AT_ONCE, thread_name_prefix="fsync")
        self._guard = threading.Lock()
        self._under_way: deque[Future[None]] = deque()

    def add(self, files: Iterable[NewFile]) -> None:
        """
        Queue *files*, which must be complete; waits if too many are pending.

        Raises:
            StorageIO: An earlier file could not be synced.
        """
        for file in files:
            if self._durable:
                file.start_writing()
            self._under_way.append(self._submit(self._sync, file))
        self._wait(SYNCING_MAX)

    def wait(self) -> None:
        """Return once all files are durable; raises as `add` does."""
        self._wait(0)

    def sync_each(self, sync: Callable[[Path], None], directories: Iterable[Path]) -> None:
        """Call *sync* with each of *directories*, several at a time."""
        for future in [self._submit(sync, directory) for directory in directories]:
            future.result()  # raises if the folder cannot be synced

    def close(self) -> None:
        """Close the pending files without syncing them."""
        self._durable = False  # queued files will only be closed: nothing will refer to them
        self._pool.shutdown()

    def _submit(self, work: Callable[[Item], None], item: Item) -> Future[None]:
        try:
            return self._pool.submit(work, item)
        except (RuntimeError, MemoryError):  # memory is short, or the interpreter exits during a save
            work(item)
            future: Future[None] = Future()
            future.set_result(None)
            return future

    def _wait(self, left_max: int) -> None:
        with self._guard:
            futures = [self._under_way.popleft() for _ in range(len(self._under_way) - left_max)]
        # Wait without the lock, so that others can add files in the meantime.
        for future in futures:
            future.result()

    def _sync(self, file: NewFile) -> None:
        with file:
            if self._durable:
                file.sync()
