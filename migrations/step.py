"""
The definition of a step from one format to the next.

The module of a released step is frozen: it must still work when the library reads a different format. So it imports
only this module, `layerstore.errors`, canonical msgpack from `layerstore.format` and the checksum from
`layerstore.hashing`; it spells out envelopes, records and ``store.json`` itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from layerstore.disk import Files
from layerstore.limits import RECORD_BYTES_MAX


class Older:
    """The files of the source format, below *root*; paths are relative to it, with ``/``."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._root = root

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in *folder*, sorted; none if it does not exist."""
        return [name for name in self.names(folder) if self._files.is_directory(self._root / folder / name)]

    def names(self, folder: str) -> list[str]:
        """Return all names in *folder*, sorted; none if it does not exist."""
        path = self._root / folder
        return self._files.names(path) if self._files.is_directory(path) else []

    def read(self, path: str) -> bytes:
        """Return the bytes of the file *path*; raise IntegrityError if it is not a file, or too large."""
        return self._files.read(self._root / path, size_bytes_max=RECORD_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step from one format to the next."""

    _JSON: ClassVar = "source target summary"

    source: int
    target: int
    summary: str
    """What changes, in a few words."""
    makes: tuple[str, ...]
    """Top-level folders that are rebuilt; the old ones go to the backup."""
    leaves: tuple[str, ...] = ()
    """Top-level folders that the target format lacks; they go to the backup."""
    removes: tuple[str, ...] = ()
    """Patterns of scratch files to delete."""
    identity: Callable[[bytes], bytes]
    """Converts the old ``store.json``; raises IntegrityError for damage, Unsupported for an unknown flag."""
    convert: Callable[[Older], Iterator[tuple[str, bytes]]]
    """
    Yields each new file's path, in a folder of *makes*, and its bytes; both depend only on the old files.

    It checks all that it reads: IntegrityError for damage, Unsupported for anything unknown. It is called twice: to
    measure, and to write.
    """
