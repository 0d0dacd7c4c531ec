"""
Verbatim copies of all records, beside the index: for ``repair`` alone, never for answers.

They are written one after another to one file, because a copy is looked for once in a store's life, if ever,
and in the index itself they would be a hundred times what it needs to find records.
Each is sealed by its own envelope, so whatever became of the file, a copy that is found is right.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import LayerstoreError
from layerstore.format.envelope import HEAD_BYTES_MAX, MAGIC, stated_name, unseal
from layerstore.limits import IO_CHUNK_BYTES, RECORD_BYTES_MAX
from layerstore.storage.kernel import mapped_errors


class Copies:
    """The file *path*; its writers take turns."""

    def __init__(self, path: Path, *, store_id: str) -> None:
        self._path = path
        self._store_id = store_id

    def append(self, records: list[bytes]) -> None:
        """
        Add *records* at the end.

        Not synced: the record itself has just been, and a copy is only needed once that has rotted.
        """
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            for data in records:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
        finally:
            os.close(fd)

    def find(self, name: str) -> bytes | None:
        """Return the newest sound copy of the record that is called *name* in the store, as its file was."""
        found = None
        for _, found in self.sound(name):  # noqa: B007  # the last one is meant
            pass
        return found

    def sound(self, wanted: str | None = None) -> Iterator[tuple[str, bytes]]:
        """
        Yield every sound copy with its record's name in the store, oldest first; only those of *wanted* if given.

        Raises:
            StorageIO: The file is there and cannot be read: whether it has a copy is not known.
        """
        with mapped_errors(self._path, doing="read"), contextlib.suppress(FileNotFoundError):
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                yield from self._sound_in(fd, wanted)
            finally:
                os.close(fd)

    def _sound_in(self, fd: int, wanted: str | None) -> Iterator[tuple[str, bytes]]:
        for at in _places(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else ():
            stated = stated_name(os.pread(fd, HEAD_BYTES_MAX, at))
            if stated is None or wanted not in {None, stated[0]} or stated[1] > RECORD_BYTES_MAX:
                continue
            data = self._sound(os.pread(fd, stated[1], at), stated[0])
            if data is not None:
                yield stated[0], data

    def _sound(self, data: bytes, name: str) -> bytes | None:
        try:
            unseal(data, name=name, store_id=self._store_id)
        except LayerstoreError:
            return None  # torn by a crash, or rotten: another copy may follow
        return data


def _places(fd: int) -> Iterator[int]:
    """Yield where a record may begin, whatever lies between."""
    at = 0
    while chunk := os.pread(fd, IO_CHUNK_BYTES + len(MAGIC) - 1, at):
        place = chunk.find(MAGIC)
        while place >= 0:
            yield at + place
            place = chunk.find(MAGIC, place + 1)
        at += IO_CHUNK_BYTES
