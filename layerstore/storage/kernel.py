"""What the kernel says and does: its errors as ours, and two calls that Python does not offer."""

import contextlib
import ctypes
import errno as errnos
import os
from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import StorageIO

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2
_START = _TO_THE_END = ctypes.c_int64(0)


@contextlib.contextmanager
def mapped_errors(path: Path, *, doing: str) -> Iterator[None]:
    """Turn OSError into StorageIO that says what was tried, where."""
    try:
        yield
    except StorageIO:
        raise
    except OSError as exc:
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        raise StorageIO(
            f"cannot {doing} {path}: {reason}", errno=exc.errno, filename=str(path), hint=_hint(exc.errno)
        ) from exc


def _hint(number: int | None) -> str | None:
    if number in {errnos.ENOSPC, errnos.EDQUOT}:
        return "free some space and repeat the command; nothing that was saved before is affected"
    if number == errnos.EFBIG:
        return "raise the limit on file sizes (ulimit -f) and repeat the command"
    if number == errnos.EMFILE:
        return "raise the limit on open files (ulimit -n) and repeat the command"
    return None


def begin_sync(fd: int) -> None:
    """
    Have the disk begin with what was written to *fd*, without waiting for it.

    The whole file: what is on its way already is not sent twice. Errors show up in the fsync that has to follow.
    """
    _LIBC.sync_file_range(fd, _START, _TO_THE_END, _SYNC_FILE_RANGE_WRITE)


def reserve(fd: int, size_bytes: int) -> bool:
    """
    Give the file *fd* its size and its blocks at once, which spares the kernel to look for each page's when it comes.

    Return whether that was possible. That it was not says nothing: not every filesystem can, and on a full disk
    what is copied may still share its blocks with its source.
    Not ``posix_fallocate``: where the filesystem cannot, that one writes to every single block.
    """
    return size_bytes > 0 and _LIBC.fallocate(fd, 0, _START, ctypes.c_int64(size_bytes)) == 0
