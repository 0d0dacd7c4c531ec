"""
What a step from one format to the next is, and all of layerstore that it may know.

A step's module is frozen once it is released: it has to work years later, when the library around it reads another
format. So it may import this module, `layerstore.errors`, `layerstore.format.canonical` and
`layerstore.format.hashing`, and no other; what it needs of envelopes, records and ``store.json`` it spells out itself.

A step makes new files and changes none: all that it makes lies in folders that its source format does not read.
So until ``store.json`` is exchanged the store is of the old format, whole, and from then on of the new one, whole.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

# What every format has, and no step may take or make.
_FIXED = frozenset({"store.json", "objects", "tmp", "locks", "manifest", "migrating", "backups"})
_FOLDER = re.compile(r"[a-z0-9][a-z0-9-]*")


class Older(Protocol):
    """The store as a step finds it; paths are below its root, with ``/``."""

    def is_folder(self, path: str) -> bool:
        """Whether *path* is a folder."""

    def names(self, folder: str) -> list[str]:
        """Return the names in *folder*, sorted; none where it is not there."""

    def read(self, path: str) -> bytes:
        """Return the bytes of the file *path*; raises IntegrityError for what is no file, or too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file of the new format."""

    path: str
    """Below the store's root, with ``/``; its first part is one of the step's `makes`."""
    data: bytes
    """All of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A way from one format to the next."""

    source: int
    """The format that it takes."""
    target: int
    """The format that it gives: the next one."""
    summary: str
    """What changes and why, in a few words."""
    leaves: tuple[str, ...]
    """Folders at the top of the store that only the source format reads; they go to the backup."""
    makes: tuple[str, ...]
    """Folders at the top of the store that the source format does not read, and that hold all that is new."""
    identity: Callable[[bytes], bytes]
    """
    From the old ``store.json`` to the new one.

    Raises IntegrityError if the old one is damaged, Unsupported if it has a flag that the step does not know.
    """
    convert: Callable[[Older], Iterator[NewFile]]
    """
    From the old files to the new ones, which depend on nothing but the old ones.

    It checks all that it reads: IntegrityError for damage, Unsupported for what it does not know.
    It is called more than once; for files that came later it gives new ones, and leaves the others as they are.
    """

    def __post_init__(self) -> None:
        assert self.target == self.source + 1, "formats are counted"
        assert not set(self.leaves) & set(self.makes), "what is made must not be read by the source format"
        assert all(_FOLDER.fullmatch(name) and name not in _FIXED for name in (*self.leaves, *self.makes))
