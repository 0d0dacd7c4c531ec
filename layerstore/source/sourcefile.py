"""
Plain reads of a source checkpoint's files, and the errors for files that cannot be used.

Another program owns a source file, which may be missing, a pipe, unreadable, or truncated while we read it. We never
map it into memory, because truncating a mapped file would kill the process that reads it (ADR 7).
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from layerstore.errors import PERMISSION_ERRNOS, InvalidInput, LayerstoreError, SourceCheckpoint, StorageIO
from layerstore.layers import typed

# Errors of the checkpoint rather than of the disk: the path does not exist, or is not a regular file.
_NO_SUCH_FILE_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_NO_PATH_ERRNOS = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})
_NOT_A_FILE_ERRNOS = frozenset({errno.EISDIR, errno.ENXIO, errno.ENODEV})


class OpenedSource:
    """A source file that has been opened; see `open_source`."""

    def __init__(self, path: Path, *, fd: int, size_bytes: int, begin: int = 0) -> None:
        """Wrap the open file *fd*, or its section of *size_bytes* from *begin*: all offsets count from *begin*."""
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd
        self._begin = begin

    def section(self, begin: int, size_bytes: int) -> "OpenedSource":
        """Return *size_bytes* from *begin* as if they were a file; valid only while this file is open."""
        if begin + size_bytes > self.size_bytes:
            raise truncated(self.path, f"{begin + size_bytes - self.size_bytes} bytes are missing at its end")
        return OpenedSource(self.path, fd=self._fd, size_bytes=size_bytes, begin=begin)

    def read_at(self, offset_bytes: int, size_bytes: int) -> bytes:
        """
        Return exactly *size_bytes* from *offset_bytes*.

        Raises:
            SourceCheckpoint: The file ends too early: it was truncated, perhaps just now.
            StorageIO: The read failed.
        """
        data = bytearray(size_bytes)
        self.read_into(memoryview(data), offset_bytes)
        return bytes(data)

    def read_each(self, buffers: Sequence[memoryview], offset_bytes: int) -> None:
        """Fill *buffers* one after another with the bytes from *offset_bytes*; raises as `read_at` does."""
        try:
            count = os.preadv(self._fd, buffers, self._begin + offset_bytes)
        except OSError as exc:
            raise _refused_by_disk(self.path, exc) from exc
        if count == sum([buffer.nbytes for buffer in buffers]):
            return
        for buffer in buffers:
            if count < len(buffer):  # the system may return less than requested
                self.read_into(buffer, offset_bytes)
            count, offset_bytes = count - len(buffer), offset_bytes + len(buffer)

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill *buffer* from *offset_bytes*; raises as `read_at` does."""
        while buffer:
            try:
                count = os.preadv(self._fd, [buffer], self._begin + offset_bytes)
            except OSError as exc:
                raise _refused_by_disk(self.path, exc) from exc
            if not count:
                raise truncated(self.path, f"{len(buffer)} bytes are missing at {offset_bytes}")
            buffer, offset_bytes = buffer[count:], offset_bytes + count


@contextmanager
def open_source(path: Path) -> Iterator[OpenedSource]:
    """
    Open *path* for plain reads, following symbolic links: `discover` has already refused unwanted links.

    Raises:
        SourceCheckpoint: *path* does not exist, or is not a regular file.
        StorageIO: *path* cannot be opened; errno is kept.
    """
    # O_NONBLOCK: opening a pipe must return at once instead of waiting for a writer. Regular files ignore the flag.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except (OSError, ValueError) as exc:  # ValueError: a NUL byte in the path
        raise _refused_by_disk(path, exc) from exc
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        yield OpenedSource(path, fd=fd, size_bytes=status.st_size)
    finally:
        os.close(fd)


def read_source_file(path: Path, *, size_bytes_max: int) -> bytes:
    """
    Return all bytes of the small file *path*.

    Raises:
        SourceCheckpoint: The file is missing, not a regular file, or has more than *size_bytes_max* bytes.
        StorageIO: The file cannot be read.
    """
    with open_source(path) as source:
        if source.size_bytes > size_bytes_max:
            raise untrusted(path, f"it has {source.size_bytes} bytes, where {size_bytes_max} are enough")
        return source.read_at(0, source.size_bytes)


def stat_source(path: Path) -> os.stat_result:
    """Return the stat of *path*, following links; raises as `open_source` does."""
    try:
        return path.stat()
    except OSError as exc:
        raise _refused_by_disk(path, exc) from exc


def real_path(path: Path) -> Path:
    """Return *path* without links or dots; raises InvalidInput if it is not a path."""
    try:
        # `is_dir` fails if the name is too long; `resolve` does not.
        real = path.resolve()
        real.is_dir()
    except (OSError, ValueError, RuntimeError) as exc:  # ValueError: a NUL; RuntimeError: a loop of links
        if isinstance(exc, OSError) and exc.errno not in _NO_PATH_ERRNOS:
            raise _refused_by_disk(path, exc) from exc
        raise InvalidInput(f"{path} is not a path: {exc}", hint="give the folder of the checkpoint") from exc
    return real


def truncated(path: Path, what: str) -> SourceCheckpoint:
    """Make the error for a file that ends too early."""
    return SourceCheckpoint(
        f"{path}: truncated: {what}; nothing was read from it",
        hint="its writer may not have finished, or was killed: wait for it, or use an older checkpoint",
        path=str(path),
        reason="truncated",
    )


def damaged(path: Path, what: str) -> SourceCheckpoint:
    """Make the error for a file whose bytes contradict each other."""
    return SourceCheckpoint(f"{path}: damaged: {what}", path=str(path), reason="damaged")


def untrusted(path: Path, what: str) -> SourceCheckpoint:
    """Make the error for a file that ``torch.save`` never writes."""
    return SourceCheckpoint(
        f"{path}: untrusted: {what}",
        hint="do not open it elsewhere either; ingest a checkpoint whose origin you know",
        path=str(path),
        reason="untrusted",
    )


def _refused_by_disk(path: Path, exc: OSError | ValueError) -> LayerstoreError:
    number = exc.errno if isinstance(exc, OSError) else errno.ENOENT
    if number in _NO_SUCH_FILE_ERRNOS:
        return SourceCheckpoint(
            f"{path}: no such file",
            hint="if the job's own rotation removed it just now, ingest sooner or let the job keep more",
            path=str(path),
            reason="missing",
        )
    if number in _NOT_A_FILE_ERRNOS:
        return _not_regular(path)
    return StorageIO(f"{path}: cannot be read: {exc}", errno=number, filename=str(path))


def _not_regular(path: Path) -> SourceCheckpoint:
    return SourceCheckpoint(f"{path}: not a regular file", path=str(path), reason="not_regular")


def list_folder(path: Path) -> list[str]:
    """Return the names in the folder *path*, sorted."""
    try:
        return sorted(os.listdir(path))  # noqa: PTH208  # names, not paths
    except OSError as exc:
        if exc.errno in PERMISSION_ERRNOS:
            hint = f"ls -ld {typed(str(path))} shows who may read it"
            raise StorageIO(
                f"cannot list {path}: {exc.strerror}", errno=exc.errno, filename=str(path), hint=hint
            ) from exc
        raise SourceCheckpoint(f"cannot list {path}: {exc.strerror}") from exc
