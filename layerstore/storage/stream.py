"""
A new file written from front to back, past the kernel's cache once it is large.

To find a page of memory for every page of a file can cost more of the processor than all else that is done with its
bytes, and pushes out what training reads. Nothing reads a save again soon: the disk takes it from our own memory.
"""

import errno as errnos
import mmap
import os

from layerstore.errors import StorageIO
from layerstore.limits import PAGE_BYTES, STREAM_BYTES
from layerstore.storage.handles import NewFile, bypass_cache

_NOT_DIRECTLY = {errnos.EINVAL, errnos.EOPNOTSUPP, errnos.ENOSYS}
_SPARE_MAX = 2
_spare: list[mmap.mmap] = []
"""Buffers of files that are complete: touched memory is cheaper than new."""


def is_wanted() -> bool:
    """Whether the user lets files go past the cache."""
    return os.environ.get("LAYERSTORE_PAGE_CACHE", "0") in {"", "0"}


class Stream:
    """Bytes on their way into *file*: as many as a buffer holds at a time."""

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._written = 0
        self._is_direct = False

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Add *data*, whose *offset* is where the last one ended."""
        assert offset == self._written + self._filled, "a stream has no gaps"
        view = memoryview(data).cast("B")
        while view:
            if self._buffer is None:
                self._buffer = _taken()
            count = min(len(view), STREAM_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == STREAM_BYTES:
                self._is_direct = self._is_direct or (not self._written and bypass_cache(self._file.fd, True))
                self._flush(STREAM_BYTES)

    def finish(self) -> None:
        """Write what is left; a file of one small piece has never left the usual way."""
        if self._is_direct:
            self._flush(self._filled - self._filled % PAGE_BYTES)
            self._is_direct = not bypass_cache(self._file.fd, False)
        self._flush(self._filled)
        self.close()

    def close(self) -> None:
        """Give the buffer back; twice is harmless."""
        if self._buffer is not None:
            if len(_spare) < _SPARE_MAX:
                _spare.append(self._buffer)
            self._buffer, self._filled = None, 0

    def _flush(self, size_bytes: int) -> None:
        """Write the first bytes of the buffer; what is behind them moves to its front."""
        if not size_bytes:
            return
        assert self._buffer is not None
        with memoryview(self._buffer) as view, view[:size_bytes] as data:
            try:
                self._file.write_at(self._written, data, at_once=self._is_direct)
            except StorageIO as exc:
                # Some filesystems take the flag and then want larger blocks, or refuse: what is written stays right.
                if not self._is_direct or exc.errno not in _NOT_DIRECTLY:
                    raise
                self._is_direct = not bypass_cache(self._file.fd, False)
                self._file.write_at(self._written, data)
        self._buffer.move(0, size_bytes, self._filled - size_bytes)
        self._written, self._filled = self._written + size_bytes, self._filled - size_bytes


def _taken() -> mmap.mmap:
    # Private, so that a forked process has spare buffers of its own. The disk only ever reads from it.
    try:
        return _spare.pop()
    except IndexError:
        return mmap.mmap(-1, STREAM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
