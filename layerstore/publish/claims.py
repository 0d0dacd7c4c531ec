"""A new record beside collections: what it inherits is claimed before, and all that it names looked at again after."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from layerstore.errors import IntegrityError, Overtaken
from layerstore.format.records import make_commit
from layerstore.model import BlobRef, Commit, CommitId, LayerEntry
from layerstore.publish.hiding import WITHDRAWN, hiding_commit
from layerstore.history.needs import objects_of_state
from layerstore.storage.rooms import Rooms
from layerstore.storage.objects import ObjectWriter


def claim(rooms: Rooms, writer: ObjectWriter, entries: Iterable[LayerEntry], states: Iterable[BlobRef] = ()) -> None:
    """
    Claim the versions of *entries*, and *states*, for a record that is about to name them.

    Raises:
        Overtaken: A collection has taken one of them.
    """
    for entry in entries:
        if not (writer.claim(entry.version) or _reuse_version(rooms, writer, entry)):
            raise Overtaken(
                f"the version of {entry.layer!r} that was to be inherited was collected meanwhile; nothing was saved",
                hint="repeat the command",
            )
    for state in states:
        if not (writer.claim(state) or _reuse_state(rooms, writer, state)):
            raise Overtaken("what this names was collected meanwhile; nothing was saved", hint="repeat the command")


def publish(rooms: Rooms, writer: ObjectWriter, commit: Commit) -> bool:
    """
    Make *commit* visible, all of whose objects *writer* has published or claimed; return whether it was new.

    Raises:
        Overtaken: A collection took some of them all the same: the writer has slept for longer than the grace. What it
            was to replace shows as before.
    """
    is_new = rooms.records.publish(commit)
    lost = writer.look_again()
    if lost:
        # One that was there and that a collection has removed came back without its objects when it was confirmed.
        if is_new or rooms.garbage.has_removed(rooms.records.name_of(commit)):
            take_back(rooms, commit)
        raise Overtaken(
            f"{len(lost)} objects were removed while they were committed (first: {lost[0].id})",
            hint="repeat the command: it writes them again",
        )
    rooms.catalog.add(commit)
    return is_new


def take_back(rooms: Rooms, commit: Commit) -> None:
    """
    Hide *commit*, which was just published and should not have been, and let show again what it alone had hidden.

    That first: whoever is killed between the two leaves a step that is shown.
    """
    hiding = hiding_commit(commit.record, commit.id, policy="drop", decisions={WITHDRAWN: True})
    try:
        for earlier in _hidden_by_it_alone(rooms, commit):
            _show_again(rooms, earlier, over=(commit.id, hiding.id))
    finally:
        rooms.records.publish(hiding)


def _hidden_by_it_alone(rooms: Rooms, commit: Commit) -> Iterator[Commit]:
    rows = rooms.catalog.view(commit.record.run).rows.values()
    by_others = {hidden for row in rows if row.id != commit.id for hidden in row.supersedes}
    for row in rows:
        if row.id in commit.record.supersedes and row.id not in by_others and row.layer_names:
            try:
                yield rooms.records.read(row.name)
            except IntegrityError:
                continue  # lost itself: as what hid it is withdrawn, it holds collections back again


def _show_again(rooms: Rooms, earlier: Commit, *, over: tuple[CommitId, ...]) -> None:
    """Publish *earlier* once more, as another record: a hidden one stays hidden."""
    record = replace(earlier.record, supersedes=tuple(sorted(over)))
    with ObjectWriter(rooms.layout, rooms.files, rooms.objects) as writer:
        # What it lacks it lacked before it was hidden, too: it is shown as it was, and verify tells.
        for entry in record.layers:
            _ = writer.claim(entry.version) or _reuse_version(rooms, writer, entry)
        for state in record.states:
            _ = writer.claim(state) or _reuse_state(rooms, writer, state)
        rooms.records.publish(make_commit(record, earlier.observed))
        writer.look_again()


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
