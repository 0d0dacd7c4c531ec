"""What the kernel says and does: its errors as ours, and calls that Python does not offer as such."""

import contextlib
import ctypes
import errno as errnos
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import StorageIO
from layerstore.layers import typed

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


def clone(source_fd: int, fd: int) -> bool:
    """Let the empty file *fd* share the blocks of *source_fd*; return whether the filesystem can."""
    return bool(_LIBC.ioctl(fd, _FICLONE, ctypes.c_int(source_fd)) == 0)
