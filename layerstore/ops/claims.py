"""A new record beside collections: what it inherits is claimed before, and all that it names looked at again after."""

from collections.abc import Iterable

from layerstore.errors import Conflict, IntegrityError
from layerstore.model import BlobRef, Commit, LayerEntry
from layerstore.ops.hiding import withdraw
from layerstore.ops.needs import objects_of_state
from layerstore.ops.rooms import Rooms
from layerstore.storage.objects import ObjectWriter


def claim(rooms: Rooms, writer: ObjectWriter, entries: Iterable[LayerEntry], states: Iterable[BlobRef] = ()) -> None:
    """
    Claim the versions of *entries*, and *states*, for a record that is about to name them.

    Raises:
        Conflict: A collection has taken one of them.
    """
    for entry in entries:
        if not (writer.claim(entry.version) or _reuse_version(rooms, writer, entry)):
            raise Conflict(
                f"the version of {entry.layer!r} that was to be inherited was collected meanwhile; nothing was saved",
                hint="repeat the command",
            )
    for state in states:
        if not (writer.claim(state) or _reuse_state(rooms, writer, state)):
            raise Conflict("what this names was collected meanwhile; nothing was saved", hint="repeat the command")


def publish(rooms: Rooms, writer: ObjectWriter, commit: Commit) -> bool:
    """
    Make *commit* visible, all of whose objects *writer* has published or claimed; return whether it was new.

    Raises:
        Conflict: A collection took some of them all the same: the writer has slept for longer than the grace.
    """
    is_new = rooms.records.publish(commit)
    lost = writer.look_again()
    if lost:
        if is_new:
            withdraw(rooms, commit)
        raise Conflict(
            f"{len(lost)} objects were removed while they were committed (first: {lost[0].id})",
            hint="repeat the command: it writes them again",
        )
    rooms.catalog.add(commit)
    return is_new


def _reuse_version(rooms: Rooms, writer: ObjectWriter, entry: LayerEntry) -> bool:
    try:
        # The blob last: at its place it says that its objects are there.
        objects = [stored.ref for stored in rooms.version_of(entry).objects]
        return all(map(writer.reuse, objects)) and writer.reuse(entry.version)
    except IntegrityError:
        return False


def _reuse_state(rooms: Rooms, writer: ObjectWriter, state: BlobRef) -> bool:
    try:
        return all(map(writer.reuse, objects_of_state(rooms.state(state)))) and writer.reuse(state)
    except IntegrityError:
        return False
