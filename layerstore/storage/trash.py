"""
The folder ``trash/``: what users dropped or replaced, and what repairs took out of the way.

Dropped records lie at ``trash/commits/RUN/STEP.ID``; what was damaged lies at ``trash/damaged/`` under the path that it
had. One rename undoes either. A file's time is when it came here; a collection empties the trash by it.
"""

import errno as errnos
from collections.abc import Iterator
from pathlib import Path

from layerstore.errors import IntegrityError, NotFound, StorageIO
from layerstore.layout import Layout
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.model import Commit
from layerstore.storage.commits import RecordName, RecordStore, name_in
from layerstore.storage.files import Files


class Trash:
    """Files that can still be brought back."""

    def __init__(self, layout: Layout, files: Files, records: RecordStore) -> None:
        self._layout = layout
        self._files = files
        self._records = records

    # -- records -------------------------------------------------------------------------------------------------

    def take_record(self, name: RecordName) -> bool:
        """Move the record *name* here, durably; return whether it was there. Its objects stay as long as it does."""
        source = self._layout.record(name.run, name.step, name.id)
        return self._move(source, self._record(name))

    def records(self) -> list[RecordName]:
        """Return the records that lie here, by run and step."""
        folder = self._layout.trash / "commits"
        found = (name_in(run, each) for run in self._folders(folder) for each in self._files.names(folder / run))
        return sorted(name for name in found if name is not None)

    def read_record(self, name: RecordName) -> Commit:
        """
        Return the commit of the record *name*, checked.

        Raises:
            NotFound: It is not here any more.
            IntegrityError: It is damaged.
        """
        try:
            data = self._files.read(self._record(name), size_bytes_max=RECORD_BYTES_MAX)
        except StorageIO as exc:
            if exc.errno == errnos.ENOENT:
                raise NotFound(f"{name.run}@{name.step} (commit {name.id[:12]}) is not in the trash any more") from exc
            raise
        return self._records.decode(data, name)

    def modified_ns(self, name: RecordName) -> int:
        """Return when the record *name* came here; 0 where it has gone."""
        return self._files.modified_ns(self._record(name)) or 0

    def remove_record(self, name: RecordName) -> None:
        """Remove the record *name* for good."""
        self._files.unlink(self._record(name))
        self._files.sync_directory(self._record(name).parent)

    def _record(self, name: RecordName) -> Path:
        return self._layout.trash / "commits" / name.run / name.file_name

    # -- what was damaged ----------------------------------------------------------------------------------------

    def take_damaged(self, path: Path) -> Path | None:
        """Move *path*, whatever it is, here, durably; return where it lies now, None where it had gone."""
        target = self._free(path)
        return target if self._move(path, target) else None

    def keep_damaged(self, path: Path) -> bool:
        """Keep the file *path* here, too, since it is about to be replaced; return whether it is one."""
        target = self._free(path)
        self._make(target.parent)
        try:
            self._files.keep_exclusive(path, target, scratch=self._layout.tmp)
        except (IntegrityError, StorageIO):
            return False
        self._files.touch(target)
        self._files.sync_directory(target.parent)
        return True

    def _free(self, path: Path) -> Path:
        target = self._layout.trash / "damaged" / self._layout.name(path)
        number = 1
        while self._files.exists(target):
            number += 1
            target = target.with_name(f"{path.name}.{number}")
        return target

    def damaged(self) -> Iterator[Path]:
        """Yield the damaged files that lie here."""
        yield from self._leaves(self._layout.trash / "damaged")

    def size_of_damaged(self, path: Path) -> int:
        """Return the bytes of *path*, which lies here; 0 where it is a link or a pipe."""
        return (self._files.size(path) or 0) if self._files.is_file(path) else 0

    def remove_damaged(self, path: Path) -> None:
        """Remove *path*, which lies here, for good."""
        self._files.unlink(path)
        folder = path.parent
        while folder != self._layout.trash / "damaged":
            self._files.remove_empty(folder)
            folder = folder.parent

    # ------------------------------------------------------------------------------------------------------------

    def _move(self, source: Path, target: Path) -> bool:
        self._make(target.parent)
        self._files.touch(source)  # from now on its age counts
        try:
            self._files.rename(source, target)
        except StorageIO as exc:
            if exc.errno == errnos.ENOENT:
                return False
            raise
        # The new name first: after a power cut it may be in both places, and never in none.
        self._files.sync_directory(target.parent)
        self._files.sync_directory(source.parent)
        return True

    def _make(self, folder: Path) -> None:
        if folder != self._layout.root:
            self._make(folder.parent)
            self._files.make_directory(folder)

    def _folders(self, folder: Path) -> list[str]:
        names = self._files.names(folder) if self._files.is_directory(folder) else []
        return [name for name in names if self._files.is_directory(folder / name)]

    def _leaves(self, folder: Path) -> Iterator[Path]:
        for name in self._files.names(folder) if self._files.is_directory(folder) else ():
            path = folder / name
            if self._files.is_directory(path):
                yield from self._leaves(path)
            else:
                yield path
