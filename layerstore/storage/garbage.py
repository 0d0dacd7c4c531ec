"""
The folder ``gc/``: objects on their way out, and the log of what collections have decided.

An object is moved aside first and looked at again before it goes: until then readers find it there, and writers
link it back. So a collection needs no lock against either (docs/reference/format.md, section 6.11).
May not decide what is garbage.
"""

import contextlib
import errno as errnos
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from layerstore.errors import LayerstoreError, StorageIO
from layerstore.format.collections import collection_name, seal_collection, unseal_collection
from layerstore.limits import COLLECTIONS_MAX, GC_RESERVE_BYTES, GC_RESERVE_RECORD_BYTES, RECORD_BYTES_MAX
from layerstore.model import Collection, ObjectId
from layerstore.storage.commits import RecordName
from layerstore.storage.files import Files
from layerstore.storage.layout import OBJECT_ID, Layout
from layerstore.storage.placement import network_filesystem

_ID = re.compile(r"(?P<number>[0-9]{8})-[0-9a-f]{8}")


def names_in(collection: Collection) -> set[RecordName]:
    """Return the records that *collection* removes."""
    return {RecordName(each.run, each.step, each.id) for each in collection.records}


class Garbage:
    """What collections have moved aside, and their plans."""

    def __init__(self, layout: Layout, files: Files, *, store_id: str) -> None:
        self._layout = layout
        self._files = files
        self._store_id = store_id

    # -- plans ---------------------------------------------------------------------------------------------------

    def next_id(self, *, after: str) -> str:
        """Return a name for a new collection, in the order of all that are known, and *after* another one."""
        numbers = [int(name[:8]) for name in (*self._plans(), *self.asides(), *([after] if after else []))]
        return f"{max(numbers, default=0) + 1:08d}-{secrets.token_hex(4)}"

    def _plans(self) -> list[str]:
        return [name for name in self._files.names(self._layout.plans) if _ID.fullmatch(name)]

    def publish(self, collection: Collection) -> None:
        """Make *collection*'s plan durable."""
        plan = self._layout.plan(collection.id)
        self._files.make_directory(plan.parent)
        with self._files.temporary(self._layout.tmp) as file:
            file.write_at(0, seal_collection(collection, store_id=self._store_id))
            file.sync()
            self._files.link_exclusive(file.path, plan)
        self._files.sync_directory(plan.parent)

    def plans_after(self, last: str) -> list[Collection]:
        """
        Return the collections after *last*, in order.

        What a plan that cannot be read has removed is then reported as vanished, which is the safe side.
        """
        found = []
        for collection_id in self._plans():
            if collection_id > last:
                with contextlib.suppress(LayerstoreError):
                    found.append(self._plan(collection_id))
        return found

    def _plan(self, collection_id: str) -> Collection:
        data = self._files.read(self._layout.plan(collection_id), size_bytes_max=RECORD_BYTES_MAX)
        return unseal_collection(data, name=collection_name(collection_id), store_id=self._store_id)

    def unfinished(self, is_there: Callable[[RecordName], bool]) -> list[Collection]:
        """Return the collections that were stopped before all their records were gone: at most the newest few are."""
        found = []
        for collection_id in reversed(self._plans()):
            try:
                plan = self._plan(collection_id)
            except LayerstoreError:
                break
            if not any(is_there(name) for name in names_in(plan)):
                break
            found.append(plan)
        return found

    def forget(self, collection_id: str) -> None:
        """Remove a plan: another one says what it has removed."""
        self._files.unlink(self._layout.plan(collection_id))
        self._files.sync_directory(self._layout.plans)

    def forget_old_plans(self) -> None:
        """Remove the oldest plans, so that there are never too many to look through."""
        for collection_id in self._plans()[:-COLLECTIONS_MAX]:
            self._files.discard(self._layout.plan(collection_id))

    def make_reserve(self, *, records: int) -> None:
        """Set aside the space that a collection needs on a full disk to remove so many *records*."""
        size_bytes = GC_RESERVE_BYTES + GC_RESERVE_RECORD_BYTES * records
        try:
            if (self._files.size(self._layout.reserve) or 0) < size_bytes:
                self._files.unlink(self._layout.reserve)
                with self._files.create(self._layout.reserve) as file:
                    file.write_at(0, bytes(size_bytes))
        except StorageIO:
            self._files.discard(self._layout.reserve)  # a full disk is what it is for

    def release_reserve(self) -> bool:
        """Give that space back; return whether there was any."""
        has_reserve = self._files.exists(self._layout.reserve)
        self._files.unlink(self._layout.reserve)
        return has_reserve

    # -- objects -------------------------------------------------------------------------------------------------

    def set_aside(self, object_id: ObjectId, *, collection_id: str) -> bool:
        """Move an object aside; return whether it was there."""
        try:
            self._files.rename(self._layout.object(object_id), self._layout.aside(collection_id) / object_id)
        except StorageIO as exc:
            if exc.errno == errnos.ENOENT:
                return False
            raise
        return True

    def open_aside(self, collection_id: str) -> None:
        """Make the folder for what is moved aside."""
        self._files.make_directory(self._layout.aside(collection_id).parent)
        self._files.make_directory(self._layout.aside(collection_id))

    def opened_ns(self, collection_id: str) -> int:
        """Return when anything was last moved aside by a collection, by the filesystem's clock."""
        return self._files.modified_ns(self._layout.aside(collection_id)) or 0

    def asides(self) -> list[str]:
        """Return the collections that have left something aside: they were interrupted, or wait for their time."""
        names = [name for name in self._files.names(self._layout.gc) if _ID.fullmatch(name)]
        return [name for name in names if self._files.is_directory(self._layout.aside(name))]

    def is_network(self) -> bool:
        """Whether another node may see an old state of the folders for a while."""
        return network_filesystem(self._layout.gc) is not None

    def settle(self, collection_id: str, *, is_needed: Callable[[ObjectId, Path], bool]) -> tuple[int, int]:
        """
        Put back what is needed of what was moved aside, then remove the rest; return how much that was.

        What is put back is durable under its name before any name in the folder goes.
        """
        folder = self._layout.aside(collection_id)
        doomed: list[ObjectId] = []
        back: list[ObjectId] = []
        for object_id, path in self.objects_aside(collection_id):
            (back if is_needed(object_id, path) else doomed).append(object_id)
        self.put_back(collection_id, back)
        removed_bytes = 0
        for object_id in doomed:
            removed_bytes += self._files.size(folder / object_id) or 0
            self._files.unlink(folder / object_id)
        self._files.sync_directory(folder)
        self._files.remove_empty(folder)
        self._files.remove_empty(folder.parent)
        return len(doomed), removed_bytes

    def put_back(self, collection_id: str, objects: Iterable[ObjectId]) -> None:
        """Give *objects* their names again."""
        folder = self._layout.aside(collection_id)
        objects = list(objects)
        homes = {self._layout.object(object_id).parent for object_id in objects}
        for home in sorted(homes):
            self._files.make_directory(home)
        for object_id in objects:
            self._files.link_exclusive(folder / object_id, self._layout.object(object_id))
        for home in sorted(homes):
            self._files.sync_directory(home)
        for object_id in objects:
            self._files.unlink(folder / object_id)

    def objects_aside(self, collection_id: str) -> Iterator[tuple[ObjectId, Path]]:
        """Yield what a collection has moved aside."""
        folder = self._layout.aside(collection_id)
        for name in self._files.names_unsorted(folder):
            if OBJECT_ID.fullmatch(name):
                yield ObjectId(name), folder / name

    # -- time ----------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time by the filesystem's own clock, which is the one that its files have their times from."""
        # The time of a folder can be set on a disk that has no room for a file. Where nothing can be written nothing
        # can be removed either: then this clock is as good.
        with contextlib.suppress(StorageIO):
            self._files.touch(self._layout.tmp)
            return self._files.modified_ns(self._layout.tmp) or time.time_ns()
        return time.time_ns()

    def sweep_tmp(self, *, before_ns: int, dry_run: bool) -> tuple[int, int]:
        """Remove the files in ``tmp/`` that nobody has written to since; return how many, and their bytes."""
        count = total_bytes = 0
        for name in self._files.names(self._layout.tmp):
            path = self._layout.tmp / name
            modified_ns = self._files.modified_ns(path)
            if modified_ns is not None and modified_ns < before_ns and self._files.is_file(path):
                count, total_bytes = count + 1, total_bytes + (self._files.size(path) or 0)
                if not dry_run:
                    self._files.unlink(path)
        return count, total_bytes
