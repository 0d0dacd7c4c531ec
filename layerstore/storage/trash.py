"""
Where files wait before removal: users can restore from ``trash/``; in ``gc/aside/``, a collection checks again.

``trash/`` holds what users dropped or replaced and what repairs moved away: dropped records at
``trash/commits/RUN/STEP.ID``, damaged files at ``trash/damaged/`` under their old paths. One rename undoes either move.
A file's mtime is the time when it was moved to the trash; collections remove old files by this time.

``gc/aside/`` holds objects: a collection moves an object there, checks it once more, and only then unlinks it.
In between, readers find the object there and writers link it back, so a collection needs no lock against either
(docs/internals/durability.md). This module does not decide what is garbage.
"""

import contextlib
import errno as errnos
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from layerstore.disk import Files, network_filesystem
from layerstore.errors import IntegrityError, NotFound, StorageIO
from layerstore.layout import OBJECT_ID, Layout
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.model import Commit, ObjectId
from layerstore.storage.commits import RecordName, RecordStore
from layerstore.units import short_id


class Trash:
    """Files that can still be restored."""

    def __init__(self, layout: Layout, files: Files, records: RecordStore) -> None:
        self._layout = layout
        self._files = files
        self._records = records

    # -- records -------------------------------------------------------------------------------------------------

    def take_record(self, name: RecordName) -> bool:
        """Durably move the record *name* to the trash, where it still keeps its objects; return whether it existed."""
        source = self._layout.record(name.run, name.step, name.id)
        return self._move(source, self._record(name))

    def records(self) -> list[RecordName]:
        """Return the records in the trash, by run and step."""
        return sorted(entry for entry in self.listed() if isinstance(entry, RecordName))

    def only_here(self) -> list[RecordName]:
        """Return the records that are only in the trash: a pull or an ingest may have made others visible again."""
        return [name for name in self.records() if not self._records.is_there(name)]

    def strangers(self) -> Iterator[Path]:
        """Yield the path of everything in ``trash/commits/`` that is not named like a record."""
        return (entry for entry in self.listed() if isinstance(entry, Path))

    def listed(self) -> Iterator[RecordName | Path]:
        """Yield the name of every record in the trash, and the path of everything else in their folders."""
        if self._files.is_directory(self._layout.dropped):
            yield from self._records.listed_in(self._layout.dropped)
        elif self._files.exists(self._layout.dropped):
            yield self._layout.dropped

    def read_record(self, name: RecordName) -> Commit:
        """
        Return the commit of the record *name*, checked.

        Raises:
            NotFound: The record is no longer in the trash.
            IntegrityError: The record is damaged.
        """
        data = self._files.read_if_there(self._record(name), size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            raise self._gone(name)
        return self._records.decode(data, name)

    def _gone(self, name: RecordName) -> NotFound:
        return NotFound(
            f"{name.run}@{name.step} (commit {short_id(name.id)}) is no longer in the trash",
            hint="if it is not back already, ingest its checkpoint again",
        )

    def modified_ns(self, name: RecordName) -> int:
        """Return when the record *name* was moved to the trash; 0 if it is gone."""
        return self._files.modified_ns(self._record(name)) or 0

    def remove_record(self, name: RecordName) -> None:
        """Remove the record *name* for good."""
        self._files.unlink(self._record(name))
        self._files.sync_directory(self._record(name).parent)

    @contextlib.contextmanager
    def restoring(self, commit: Commit) -> Iterator[None]:
        """Remove the record of *commit* from the trash once the block has made it visible."""
        yield
        # Last, and not after an error: a commit may be both in the trash and visible, but never neither.
        self.remove_record(self._records.name_of(commit))

    def _record(self, name: RecordName) -> Path:
        return self._layout.dropped / name.run / name.file_name

    # -- what was damaged ----------------------------------------------------------------------------------------

    def take_damaged(self, path: Path) -> Path | None:
        """Move *path* to the trash, whatever it is, durably; return its new path; None if it was gone."""
        target = self._free(path)
        return target if self._move(path, target) else None

    def keep_damaged(self, path: Path) -> bool:
        """Copy the record *path* to the trash before it is replaced; return whether it could be read."""
        target = self._free(path)
        self._make(target.parent)
        try:
            data = self._files.read(path, size_bytes_max=RECORD_BYTES_MAX)
        except (IntegrityError, StorageIO):
            return False  # it cannot be read, so there is nothing to keep
        with self._files.temporary(self._layout.tmp, data) as copy:
            self._files.link_exclusive(copy, target)
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
        """Yield the damaged files in the trash."""
        yield from self._leaves(self._layout.trash / "damaged")

    def size_of_damaged(self, path: Path) -> int:
        """Return the size of *path* in the trash; 0 if it is a link or a pipe."""
        return (self._files.size(path) or 0) if self._files.is_file(path) else 0

    def remove_damaged(self, path: Path) -> None:
        """Remove *path* from the trash for good."""
        # Not synced: the next collection removes what a power cut brings back.
        self._files.unlink(path)
        folder = path.parent
        while folder != self._layout.trash / "damaged":
            self._files.remove_empty(folder)
            folder = folder.parent

    # ------------------------------------------------------------------------------------------------------------

    def _move(self, source: Path, target: Path) -> bool:
        self._make(target.parent)
        # Touch the file before the rename: with its old mtime, a collection could remove it from the trash at once.
        self._files.touch(source)
        try:
            self._files.rename(source, target)
        except StorageIO as exc:
            if exc.errno == errnos.ENOENT:
                return False
            raise
        # Sync the new folder first: after a power cut the file may be in both folders, but never in neither.
        self._files.sync_directory(target.parent)
        self._files.sync_directory(source.parent)
        return True

    def _make(self, folder: Path) -> None:
        if folder != self._layout.root:
            self._make(folder.parent)
            self._files.make_directory(folder)

    def _leaves(self, folder: Path) -> Iterator[Path]:
        for name in self._files.names_in_folder(folder):
            path = folder / name
            if self._files.is_directory(path):
                yield from self._leaves(path)
            else:
                yield path


class Aside:
    """Objects that collections have moved aside, and the clock that decides which are old."""

    def __init__(self, layout: Layout, files: Files) -> None:
        self._layout = layout
        self._files = files

    def make_folder(self) -> None:
        """Make the folder ``gc/aside/``."""
        self._files.make_directory(self._layout.gc)
        self._files.make_directory(self._layout.aside)

    def take(self, object_id: ObjectId) -> None:
        """Move an object aside; does nothing if the same file is also aside: a writer has just linked it back."""
        try:
            # POSIX: rename does nothing if both names are the same file.
            self._files.rename(self._layout.object(object_id), self._layout.aside / object_id)
        except StorageIO as exc:
            if exc.errno != errnos.ENOENT:  # another collection was faster
                raise

    def ids(self) -> list[ObjectId]:
        """Return the objects that are aside."""
        return [ObjectId(name) for name in self._files.names_unsorted(self._layout.aside) if OBJECT_ID.fullmatch(name)]

    def moved_ns(self, path: Path) -> int:
        """Return when *path* was moved aside, by the filesystem's clock: a rename sets the ctime."""
        state = self._files.look(path)
        return 0 if state is None else state.st_ctime_ns

    def sync(self) -> None:
        """Make the unlinks durable."""
        self._files.sync_directory(self._layout.aside)

    @cached_property
    def is_on_network(self) -> bool:
        """Whether another node may see stale folders for a while."""
        return network_filesystem(self._layout.root) is not None

    # -- time ----------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time by the clock that stamps files."""
        # Touch a folder, since a full disk has no room for a file. If nothing can be written, nothing can be removed
        # either, and this host's clock will do.
        with contextlib.suppress(StorageIO):
            self._files.touch(self._layout.tmp)
            return self._files.modified_ns(self._layout.tmp) or time.time_ns()
        return time.time_ns()

    def leftovers(self, *, before_ns: int) -> list[tuple[Path, int]]:
        """Return the files in ``tmp/`` that were last written before *before_ns*, with their sizes."""
        leftovers = []
        for name in self._files.names(self._layout.tmp):
            path = self._layout.tmp / name
            modified_ns = self._files.modified_ns(path)
            if modified_ns is not None and modified_ns < before_ns and self._files.is_file(path):
                leftovers.append((path, self._files.size(path) or 0))
        return leftovers
