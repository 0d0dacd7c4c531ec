"""
Open files of the seam: one that is being written, one that is read.

`Files` hands them out. Tests put their faults at the hook, which is called before each change of the disk.
"""

import errno as errnos
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from layerstore.errors import IntegrityError
from layerstore.limits import IO_CHUNK_BYTES, SYNC_AHEAD_BYTES, WRITE_BYTES
from layerstore.storage.kernel import begin_sync, mapped_errors, reserve

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
