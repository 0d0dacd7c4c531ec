"""
What a step from one format to the next is, and all of layerstore that it may know.

A step's module is frozen once it is released: it has to work years later, when the library around it reads another
format. So it imports this module, `layerstore.errors`, and from `layerstore.format` only msgpack's one spelling and
the checksum. Envelopes, records and ``store.json`` it spells out itself.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

# What every format has, and no step replaces.
_FIXED = frozenset({"store.json", "objects", "tmp", "locks", "manifest", "migrating", "backups"})
_FOLDER = re.compile(r"[a-z0-9][a-z0-9-]*")


class Older(Protocol):
    """The files of the source format; paths are below its root, with ``/``."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in *folder*, sorted; none where it is not there, or is no folder."""

    def names(self, folder: str) -> list[str]:
        """Return all names in *folder*, sorted; none where it is not there, or is no folder."""

    def read(self, path: str) -> bytes:
        """Return the bytes of the file *path*; raises IntegrityError for what is no file, or too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file of the target format."""

    path: str
    """Below the store's root, with ``/``; it begins with one of the step's `makes`."""
    data: bytes


def _no_moves(_: Older) -> Iterator[tuple[str, str]]:
    return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A way from one format to the next."""

    source: int
    target: int
    """The next format."""
    summary: str
    """What changes, in a few words."""
    makes: tuple[str, ...]
    """Folders at the top of the store that are made anew; what lies in their places goes to the backup."""
    leaves: tuple[str, ...] = ()
    """Folders at the top of the store that the target format does not have; they go to the backup."""
    removes: tuple[str, ...] = ()
    """Scratch that goes for good: patterns of paths, whose last part may hold ``*``."""
    identity: Callable[[bytes], bytes]
    """
    From the old ``store.json`` to the new one.

    Raises IntegrityError if the old one is damaged, Unsupported if it has a flag that the step does not know.
    """
    convert: Callable[[Older], Iterator[NewFile]]
    """
    From the old files to the new ones, which depend on nothing but the old ones.

    It checks all that it reads: IntegrityError for damage, Unsupported for what it does not know. It is called twice:
    before anything is written, and to write.
    """
    moves: Callable[[Older], Iterator[tuple[str, str]]] = _no_moves
    """From the folders that went to the backup: files that the target format has elsewhere, each with its new path."""

    def __post_init__(self) -> None:
        assert self.target == self.source + 1, "formats are counted"
        assert not set(self.leaves) & set(self.makes), "a folder is replaced or left, not both"
        assert all(_FOLDER.fullmatch(name) and name not in _FIXED for name in (*self.leaves, *self.makes))
