"""
The folder ``gc/``: objects on their way out, and the log of what collections have decided.

An object is moved aside first and looked at again before it goes: until then readers find it there, and writers
link it back. So a collection needs no lock against either (docs/reference/format.md, section 6.11).
May not decide what is garbage.
"""

import contextlib
import errno as errnos
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from layerstore.errors import LayerstoreError, StorageIO
from layerstore.format.collections import collection_name, seal_collection, unseal_collection
from layerstore.limits import (
    COLLECTIONS_MAX,
    GC_RESERVE_BYTES,
    GC_RESERVE_LAYER_BYTES,
    GC_RESERVE_RECORD_BYTES,
    RECORD_BYTES_MAX,
)
from layerstore.model import Collection, ObjectId
from layerstore.storage.commits import RecordName
from layerstore.storage.files import Files
from layerstore.storage.layout import OBJECT_ID, Layout
from layerstore.storage.placement import network_filesystem

# Objects that are settled together: a folder is synced once for those of a share that go back to it.
_SHARE = 8192

_ID = re.compile(r"(?P<number>[0-9]{8})-[0-9a-f]{8}")


def names_in(collection: Collection) -> set[RecordName]:
    """Return the records that *collection* removes."""
    return {RecordName(each.run, each.step, each.id) for each in collection.records}


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """
    Let the body end where what it works on is gone: another collection began while this one had lost its lock.

    It has looked again before it removed anything, as this one does.
    """
    try:
        yield
    except StorageIO as exc:
        if exc.errno != errnos.ENOENT:
            raise


class Garbage:
    """What collections have moved aside, and their plans."""

    def __init__(self, layout: Layout, files: Files, *, store_id: str) -> None:
        self._layout = layout
        self._files = files
        self._store_id = store_id

    # -- plans ---------------------------------------------------------------------------------------------------

    def next_id(self) -> str:
        """Return a name for a new collection, in the order of all that are known."""
        numbers = [int(name[:8]) for name in (*self._plans(), *self.asides())]
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

        What a plan that cannot be read has removed is then reported as vanished, which is the safe side. One that
        goes meanwhile has a successor, which says what both have removed: that is looked for again.
        """
        found: dict[str, Collection | None] = {}
        while unread := [each for each in self._plans() if each > last and each not in found]:
            for collection_id in unread:
                found[collection_id] = None
                with contextlib.suppress(LayerstoreError):
                    found[collection_id] = self._plan(collection_id)
        return [plan for _, plan in sorted(found.items()) if plan is not None]

    def _plan(self, collection_id: str) -> Collection:
        data = self._files.read(self._layout.plan(collection_id), size_bytes_max=RECORD_BYTES_MAX)
        return unseal_collection(data, name=collection_name(collection_id), store_id=self._store_id)

    def has_removed(self, name: RecordName) -> bool:
        """Whether a collection that is known has removed the record *name*, or was about to."""
        return any(name in names_in(plan) for plan in self.plans_after(""))

    def damaged_plans(self) -> Iterator[tuple[Path, LayerstoreError]]:
        """Yield the plans that cannot be read, and why."""
        for collection_id in self._plans():
            try:
                self._plan(collection_id)
            except LayerstoreError as exc:
                if self._files.exists(self._layout.plan(collection_id)):  # else an old one, removed meanwhile
                    yield self._layout.plan(collection_id), exc

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

    def make_reserve(self, *, records: int, layers: int) -> None:
        """Set aside what a collection needs on a full disk to remove *records*, or moments of one with *layers*."""
        size_bytes = GC_RESERVE_BYTES + GC_RESERVE_RECORD_BYTES * records + GC_RESERVE_LAYER_BYTES * layers
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
        with _unless_gone():  # then nothing is moved, and the next collection sees to it
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

        Share by share, so that a million take no more memory than one share. What is put back of a share is durable
        under its name before any name of it goes from the folder.
        """
        folder = self._layout.aside(collection_id)
        removed = removed_bytes = 0
        names = self.objects_aside(collection_id)
        while share := list(itertools.islice(names, _SHARE)):
            doomed: list[Path] = []
            back: list[ObjectId] = []
            for object_id, path in share:
                if is_needed(object_id, path):
                    back.append(object_id)
                else:
                    doomed.append(path)
            self.put_back(collection_id, back)
            for path in doomed:
                removed_bytes += self._files.size(path) or 0
                self._files.unlink(path)
            removed += len(doomed)
        with _unless_gone():
            self._files.sync_directory(folder)
            self._files.remove_empty(folder)
            self._files.remove_empty(folder.parent)
        return removed, removed_bytes

    def put_back(self, collection_id: str, objects: Iterable[ObjectId]) -> None:
        """Give *objects* their names again."""
        folder = self._layout.aside(collection_id)
        objects = list(objects)
        homes = {self._layout.object(object_id).parent for object_id in objects}
        for home in sorted(homes):
            self._files.make_directory(home)
        for object_id in objects:
            with _unless_gone():
                self._files.link_exclusive(folder / object_id, self._layout.object(object_id))
        for home in sorted(homes):
            self._files.sync_directory(home)
        for object_id in objects:
            self._files.unlink(folder / object_id)

    def objects_aside(self, collection_id: str) -> Iterator[tuple[ObjectId, Path]]:
        """Yield what a collection has moved aside; some filesystems leave some out if others go meanwhile."""
        folder = self._layout.aside(collection_id)
        for name in self._files.each_name(folder):
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
