"""What a new record inherits, claimed before any collection takes it."""

from collections.abc import Iterable

from layerstore.errors import Conflict, IntegrityError
from layerstore.model import BlobRef, LayerEntry
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
