"""
What is needed, found out from the records, pins and open parts themselves: never from the index.

Whatever cannot be read stops it: what that needs is not known.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.format.blobs import STATE_MAGIC, VERSION_MAGIC
from layerstore.limits import BLOB_BYTES_MAX
from layerstore.model import BlobRef, CommitId, ObjectId, Pin
from layerstore.ops.needs import Needs
from layerstore.ops.progress import Progress
from layerstore.ops.rooms import Rooms
from layerstore.storage.commits import RecordName


@dataclass(frozen=True, slots=True, kw_only=True)
class Unneeded:
    """Objects that nothing needs, with their sizes."""

    old: dict[ObjectId, int]
    young: dict[ObjectId, int]
    """Somebody may be about to name these."""


class Marks:
    """What is needed, as far as has been looked; looking again finds what has come since."""

    def __init__(self, rooms: Rooms, *, without: Collection[RecordName], dead_before_ns: int) -> None:
        self._rooms = rooms
        self._seen = set(without)
        self._dead_before_ns = dead_before_ns
        self.needs = Needs(rooms)
        self.dead_sessions: list[str] = []
        """Those in which nothing was done for so long that nobody will join their parts."""

    def look(self, progress: Progress) -> None:
        """
        Note what is needed by all that is there and was not seen yet.

        In the order in which a save goes from one to the next, so that what moves on meanwhile is seen all the same.

        Raises:
            IntegrityError: Something cannot be read.
        """
        self._mark_parts()
        self._mark_records(progress)
        for pin in readable_pins(self._rooms):
            with _named(f"pin {pin.name!r}"):
                self.needs.add_record(pin.record)

    def _mark_parts(self) -> None:
        self.dead_sessions.clear()  # one may have come to life again
        for session in self._rooms.parts.sessions():
            if self._rooms.parts.modified_ns(session) < self._dead_before_ns:
                self.dead_sessions.append(session)
                continue
            for part in self._rooms.parts.of_session(session):
                with _named(f"save {part.save} of session {session[:12]}"):
                    self.needs.add_part(part)

    def _mark_records(self, progress: Progress) -> None:
        for run in self._rooms.records.runs():
            for name in self._rooms.records.names(run):
                if name not in self._seen:
                    with _named(f"{name.run}@{name.step}"):
                        self.needs.add_record(self._rooms.records.read(name).record)
                    self._seen.add(name)
                    progress.advance(1)

    def unneeded(self, *, old_before_ns: int) -> Unneeded:
        """Return what nothing needs of all objects at their places."""
        found = Unneeded(old={}, young={})
        for object_id, path in self._rooms.objects.ids():
            if object_id in self.needs:
                continue
            modified_ns, size_bytes = self._rooms.files.modified_ns(path), self._rooms.files.size(path)
            if modified_ns is not None and size_bytes is not None:
                (found.old if modified_ns < old_before_ns else found.young)[object_id] = size_bytes
        for object_id, size_bytes in list(found.young.items()):
            self.keep_with(BlobRef(id=object_id, size_bytes=size_bytes))
        for object_id in [object_id for object_id in found.old if object_id in self.needs]:
            found.young[object_id] = found.old.pop(object_id)
        return found

    def keep_with(self, ref: BlobRef) -> None:
        """
        Note what *ref* names, if it is a version or state blob.

        A young one stands for a record that is about to name it: whoever makes that has only claimed the blob.
        """
        if ref.size_bytes > BLOB_BYTES_MAX:
            return
        try:
            with self._rooms.objects.open(ref) as file:
                magic = file.read_at(0, min(len(VERSION_MAGIC), ref.size_bytes))
            if magic == VERSION_MAGIC:
                self.needs.add_version(ref)
            elif magic == STATE_MAGIC:
                self.needs.add_state(ref)
        except LayerstoreError:
            return  # damaged, and named by nothing: nobody can be about to commit it


def pinned_commits(rooms: Rooms) -> dict[CommitId, str]:
    """Return the commits that pins name as they stand; a pinned composite keeps its own layers, not its base."""
    found = {}
    for pin in readable_pins(rooms):
        name = RecordName(pin.record.run, pin.record.step, pin.base)
        if name in rooms.records.names(name.run) and rooms.records.read(name).record.layers == pin.record.layers:
            found[pin.base] = pin.name
    return found


def readable_pins(rooms: Rooms) -> Iterator[Pin]:
    """Yield every pin; raises IntegrityError at one that is damaged."""
    for name in rooms.records.pin_names():
        with contextlib.suppress(NotFound):  # deleted meanwhile
            yield rooms.records.read_pin(name)


@contextlib.contextmanager
def _named(called: str) -> Iterator[None]:
    """Say of a damage whose it is, and that nothing was removed."""
    try:
        yield
    except IntegrityError as exc:
        raise IntegrityError(
            f"what {called} needs is not known: {exc}; nothing was removed",
            hint="layerstore verify lists the damage",
        ) from exc
