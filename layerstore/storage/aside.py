"""
The folder ``gc/aside/``: objects on their way out.

A collection moves an object here, looks at it once more, and only then unlinks it. Meanwhile readers find it here and
writers link it back, so a collection needs no lock against either (docs/internals/durability.md).
May not decide what is garbage.
"""

import contextlib
import errno as errnos
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from layerstore.errors import StorageIO
from layerstore.layout import OBJECT_ID, Layout
from layerstore.model import ObjectId
from layerstore.storage.files import Files
from layerstore.storage.placement import network_filesystem


class Aside:
    """Objects that collections have moved aside, and the clock that tells which are old."""

    def __init__(self, layout: Layout, files: Files) -> None:
        self._layout = layout
        self._files = files

    def make_folder(self) -> None:
        """Make the folder."""
        self._files.make_directory(self._layout.gc)
        self._files.make_directory(self._layout.aside)

    def take(self, object_id: ObjectId) -> None:
        """Move an object aside; nothing happens where it lies here, too: then somebody has just linked it back."""
        try:
            # POSIX renames nothing where both are names of one file.
            self._files.rename(self._layout.object(object_id), self._layout.aside / object_id)
        except StorageIO as exc:
            if exc.errno != errnos.ENOENT:
                raise

    def objects(self) -> Iterator[tuple[ObjectId, Path]]:
        """Yield what lies aside; some filesystems leave names out if others go meanwhile."""
        for name in self._files.each_name(self._layout.aside):
            if OBJECT_ID.fullmatch(name):
                yield ObjectId(name), self._layout.aside / name

    def moved_ns(self, path: Path) -> int:
        """Return when *path* came here, by the filesystem's clock; a rename changes that of its state."""
        return self._files.changed_ns(path) or 0

    def remove(self, objects: Iterable[ObjectId]) -> None:
        """Unlink what lies here of *objects*."""
        for object_id in objects:
            self._files.unlink(self._layout.aside / object_id)

    def sync(self) -> None:
        """Make durable what was unlinked."""
        self._files.sync_directory(self._layout.aside)

    @property
    def is_on_network(self) -> bool:
        """Whether another node may see an old state of the folders for a while."""
        return network_filesystem(self._layout.root) is not None

    # -- time ----------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time by the clock that the files here have their times from."""
        # The time of a folder can be set on a disk that has no room for a file. Where nothing can be written nothing
        # can be removed either, and this host's clock is as good.
        with contextlib.suppress(StorageIO):
            self._files.touch(self._layout.tmp)
            return self._files.modified_ns(self._layout.tmp) or time.time_ns()
        return time.time_ns()

    def leftovers(self, *, before_ns: int) -> list[tuple[Path, int]]:
        """Return the files in ``tmp/`` that nobody has written to since *before_ns*, with their sizes."""
        found = []
        for name in self._files.names(self._layout.tmp):
            path = self._layout.tmp / name
            modified_ns = self._files.modified_ns(path)
            if modified_ns is not None and modified_ns < before_ns and self._files.is_file(path):
                found.append((path, self._files.size(path) or 0))
        return found
