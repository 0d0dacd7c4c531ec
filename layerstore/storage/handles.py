"""Open files of the seam, and calls of the kernel that Python does not offer as such."""

import contextlib
import ctypes
import errno as errnos
import fcntl
import mmap
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from layerstore.errors import IntegrityError, StorageIO
from layerstore.layers import typed
from layerstore.limits import IO_CHUNK_BYTES, SYNC_AHEAD_BYTES, WRITE_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_CWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = ctypes.c_ulong(0x40049409)
_START = _TO_THE_END = ctypes.c_int64(0)

_FREE_SPACE = "free some space and repeat the command; nothing that was saved before is affected"
_HINTS = {
    errnos.EROFS: "the filesystem is read-only: what is there can be read and composed, nothing can be written",
    errnos.ENOSPC: _FREE_SPACE,
    errnos.EDQUOT: _FREE_SPACE,
    errnos.EFBIG: "raise the limit on file sizes (ulimit -f) and repeat the command",
    errnos.EMFILE: "raise the limit on open files (ulimit -n) and repeat the command",
    errnos.ENOMEM: "raise the limit on memory (ulimit -v), or end what else uses it, and repeat the command",
}


@contextlib.contextmanager
def mapped_errors(path: Path, *, doing: str) -> Iterator[None]:
    """Turn OSError into StorageIO that says what was tried, where."""
    try:
        yield
    except StorageIO:
        raise
    except OSError as exc:
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        if exc.errno == errnos.ELOOP and path.is_symlink():
            reason = "it is a link, which is never followed"
        raise StorageIO(
            f"cannot {doing} {path}: {reason}", errno=exc.errno, filename=str(path), hint=_hint(exc.errno, path)
        ) from exc


def _hint(number: int | None, path: Path) -> str | None:
    if number in {errnos.EACCES, errnos.EPERM}:
        return _whose(path)
    if number == errnos.ELOOP and path.is_symlink():
        return f"remove {typed(str(path))} by hand, and find out who put it there; what is needed is made again"
    return None if number is None else _HINTS.get(number)


def _whose(path: Path) -> str | None:
    """Say whose the file is, or the folder on the way to it, that keeps this process out."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):  # not there, or behind a folder that may not be looked into
            state = place.lstat()
            wanted = os.R_OK | os.W_OK | (os.X_OK if stat.S_ISDIR(state.st_mode) else 0)
            if not os.access(place, wanted):
                return (
                    f"{place} is user {state.st_uid}'s, of group {state.st_gid}, with mode "
                    f"{stat.S_IMODE(state.st_mode):04o}; you are user {os.geteuid()}. A store that several share wants "
                    "a common group, setgid folders and umask 002"
                )
    return None


def rename_exclusive(source: Path, target: Path) -> bool:
    """
    Move *source* to *target* unless something is there, in one step; return whether that was free.

    Raises:
        OSError: As the system says; EINVAL where the filesystem cannot do that.
    """
    if _LIBC.renameat2(_AT_CWD, os.fsencode(source), _AT_CWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    number = ctypes.get_errno()
    if number == errnos.EEXIST:
        return False
    raise OSError(number, os.strerror(number), os.fspath(target))


def begin_sync(fd: int) -> None:
    """
    Have the disk begin with what was written to *fd*, without waiting for it.

    The whole file: what is on its way already is not sent twice. Errors show up in the fsync that has to follow.
    """
    _LIBC.sync_file_range(fd, _START, _TO_THE_END, _SYNC_FILE_RANGE_WRITE)


def bypass_cache(fd: int, on: bool) -> bool:
    """
    Let what is written to *fd* go from the caller's memory to the disk, or through the kernel's cache again.

    Return whether that could be done. Past the cache memory, place and size of each write have to be whole pages.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False  # there are filesystems that have nothing but the cache
    return True


def reserve(fd: int, size_bytes: int) -> bool:
    """
    Give the file *fd* its size and its blocks at once, which spares the kernel to look for each page's when it comes.

    Return whether that was possible. That it was not says nothing: not every filesystem can, and on a full disk
    what is copied may still share its blocks with its source.
    Not ``posix_fallocate``: where the filesystem cannot, that one writes to every single block.
    """
    return size_bytes > 0 and _LIBC.fallocate(fd, 0, _START, ctypes.c_int64(size_bytes)) == 0


Hook = Callable[[str, Path], None]
"""Called with the operation's name and its path before each change of the disk."""

# Kernel or filesystem cannot copy between these two files: copy through a buffer instead.
_COPY_UNSUPPORTED = {errnos.EXDEV, errnos.ENOSYS, errnos.EOPNOTSUPP, errnos.EINVAL, errnos.EBADF, errnos.EPERM}


def no_hook(operation: str, path: Path) -> None:
    """Do nothing: what production does before each change."""


class NewFile:
    """A file being written. Closed and removed if anything goes wrong before it was published."""

    def __init__(self, path: Path, fd: int, hook: Hook, *, sync_ahead: bool = False) -> None:
        self.path = path
        self.fd = fd
        self._hook = hook
        self._sync_ahead = sync_ahead
        self._waiting_bytes = 0

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, *, at_once: bool = False) -> None:
        """Write all of *data* at *offset*, *at_once* or in the pieces that the kernel's cache likes best."""
        self._hook("write", self.path)
        view = memoryview(data).cast("B")
        with mapped_errors(self.path, doing="write"):
            while view:
                count = os.pwrite(self.fd, view if at_once else view[:WRITE_BYTES], offset)
                view, offset = view[count:], offset + count
                self._written(count)

    def copy_from(self, source: "OpenFile", source_offset: int, offset: int, size_bytes: int) -> None:
        """Have the kernel copy *size_bytes* from *source*; it shares blocks where the filesystem can."""
        self._hook("copy", self.path)
        with mapped_errors(self.path, doing="copy to"):
            while size_bytes:
                count = self._copy_some(source, source_offset, offset, size_bytes)
                source_offset, offset, size_bytes = source_offset + count, offset + count, size_bytes - count
                self._written(count)

    def _copy_some(self, source: "OpenFile", source_offset: int, offset: int, size_bytes: int) -> int:
        try:
            count = os.copy_file_range(source.fd, self.fd, min(size_bytes, SYNC_AHEAD_BYTES), source_offset, offset)
        except OSError as exc:
            if exc.errno not in _COPY_UNSUPPORTED:
                raise
            data = source.read_at(source_offset, min(size_bytes, IO_CHUNK_BYTES))
            self.write_at(offset, data)
            return len(data)
        if not count:
            raise source.cut_short(source_offset + size_bytes)
        return count

    def _written(self, size_bytes: int) -> None:
        """Have the disk begin while the rest is still being written, so that `sync` finds little to wait for."""
        self._waiting_bytes += size_bytes
        if self._sync_ahead and self._waiting_bytes >= SYNC_AHEAD_BYTES:
            self._waiting_bytes = 0
            begin_sync(self.fd)

    def clone(self, source: "OpenFile") -> bool:
        """Let this file, which is empty, share the blocks of *source*; return whether the filesystem can."""
        return bool(_LIBC.ioctl(self.fd, _FICLONE, ctypes.c_int(source.fd)) == 0)

    def set_size(self, size_bytes: int) -> None:
        """Give the file its length; what is not written reads as zeros."""
        self._hook("truncate", self.path)
        with mapped_errors(self.path, doing="resize"):
            if not reserve(self.fd, size_bytes):
                os.ftruncate(self.fd, size_bytes)

    def make_executable(self) -> None:
        """Let whoever may read the file also execute it."""
        with mapped_errors(self.path, doing="change the mode of"):
            mode = os.fstat(self.fd).st_mode
            os.fchmod(self.fd, mode | (mode & 0o444) >> 2)

    def sync(self) -> None:
        """Make the bytes durable. A failed fsync is never repeated: the kernel may have dropped the pages."""
        self._hook("fsync", self.path)
        with mapped_errors(self.path, doing="fsync"):
            os.fsync(self.fd)

    def close(self) -> None:
        """Close the file; twice is harmless."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with mapped_errors(self.path, doing="close"):
                os.close(fd)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenFile:
    """A regular file open for reading."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = size_bytes
        """When it was opened."""

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Return exactly *size_bytes* from *offset*."""
        data = bytearray(size_bytes)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* from *offset*."""
        with mapped_errors(self.path, doing="read"):
            while buffer:
                count = os.preadv(self.fd, [buffer], offset)
                if not count:
                    raise self.cut_short(offset + len(buffer))
                buffer, offset = buffer[count:], offset + count

    def map(self) -> mmap.mmap:
        """Return all bytes as memory that nobody can write to; it stays when the file is closed, or removed."""
        with mapped_errors(self.path, doing="map"):
            try:
                if sys.version_info >= (3, 13):  # else Python keeps a descriptor for each
                    return mmap.mmap(self.fd, self.size_bytes, access=mmap.ACCESS_READ, trackfd=False)
                return mmap.mmap(self.fd, self.size_bytes, access=mmap.ACCESS_READ)
            except ValueError as exc:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
