"""
Large files written to disk without the page cache.

Finding a cache page for every page of a large file can cost more CPU time than all other work on its bytes, and evicts
data that training reads. Nobody rereads a save soon, so large files are written to disk straight from our own memory.
"""

import errno as errnos
import fcntl
import mmap
import os

from layerstore.disk.open_files import NewFile
from layerstore.errors import StorageIO
from layerstore.limits import PAGE_BYTES, STREAM_BYTES

# Errors from filesystems that cannot bypass the page cache.
_NOT_DIRECTLY = {errnos.EINVAL, errnos.EOPNOTSUPP, errnos.ENOSYS}
_SPARE_MAX = 2
_spare: list[mmap.mmap] = []
"""Buffers to reuse: touched memory is cheaper than new memory."""


def bypass_cache(fd: int, on: bool) -> bool:
    """
    Make writes to *fd* bypass the page cache or, if not *on*, use it; return whether the filesystem supports this.

    While writes bypass the cache, the address, offset and size of each must be multiples of the page size.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False  # such as tmpfs, which is nothing but cache
    return True


class Stream:
    """Writes a file from front to back: in whole buffers if *past_cache*, otherwise as the data comes."""

    def __init__(self, file: NewFile, *, past_cache: bool = True) -> None:
        self.file = file
        self.is_kept = False
        """Whether the file will become an object, and so must not be removed."""
        self._past_cache = past_cache and os.environ.get("LAYERSTORE_PAGE_CACHE", "0") in {"", "0"}
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._written = 0
        self._is_direct = False

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write *data* at *offset*, which must be where the previous write ended."""
        if not self._past_cache:
            self.file.write_at(offset, data)
            return
        assert offset == self._written + self._filled, "a stream has no gaps"
        view = memoryview(data).cast("B")
        while view:
            if self._buffer is None:
                self._buffer = _take_buffer()
            count = min(len(view), STREAM_BYTES - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == STREAM_BYTES:
                # Decided at the first full buffer: a file that never fills a buffer belongs in the cache.
                self._is_direct = self._is_direct or (not self._written and bypass_cache(self.file.fd, True))
                self._flush(STREAM_BYTES)

    def finish(self) -> None:
        """Write the rest; a small file goes through the cache entirely."""
        if self._is_direct:
            # Only whole pages may bypass the cache: the rest of the last page is written once O_DIRECT is off.
            self._flush(self._filled - self._filled % PAGE_BYTES)
            self._is_direct = not bypass_cache(self.file.fd, False)
        self._flush(self._filled)
        self.close()

    def close(self) -> None:
        """Return the buffer for reuse; closing twice is harmless."""
        if self._buffer is not None:
            if len(_spare) < _SPARE_MAX:
                _spare.append(self._buffer)
            self._buffer, self._filled = None, 0

    def _flush(self, size_bytes: int) -> None:
        """Write the first *size_bytes* of the buffer and move the rest to its front."""
        if not size_bytes:
            return
        assert self._buffer is not None
        with memoryview(self._buffer) as view, view[:size_bytes] as data:
            try:
                self.file.write_at(self._written, data, at_once=self._is_direct)
            except StorageIO as exc:
                # Some filesystems accept the flag but then refuse the write, or want larger blocks.
                if not self._is_direct or exc.errno not in _NOT_DIRECTLY:
                    raise
                self._is_direct = not bypass_cache(self.file.fd, False)
                self.file.write_at(self._written, data)
        self._buffer.move(0, size_bytes, self._filled - size_bytes)
        self._written, self._filled = self._written + size_bytes, self._filled - size_bytes


def _take_buffer() -> mmap.mmap:
    # A private map, so that a forked process has its own spare buffers. The disk only reads from the buffers.
    try:
        return _spare.pop()
    except IndexError:
        return mmap.mmap(-1, STREAM_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
