"""What was lost while it was read: to a collection, which is no damage and has another remedy; else of which layer."""

from collections.abc import Iterator
from contextlib import contextmanager

from layerstore.errors import DAMAGED_HINT, Conflict, IntegrityError
from layerstore.model import CommitRecord, LayerEntry
from layerstore.ops.composition import Composition
from layerstore.ops.marking import readable_pins
from layerstore.ops.past import saved_at
from layerstore.ops.refs import references_to
from layerstore.ops.rooms import Rooms


@contextmanager
def losses_told(rooms: Rooms, composition: Composition) -> Iterator[None]:
    """
    Read what *composition* consists of in the body.

    Raises:
        Conflict: Something of it is missing, and no record or pin names it any more: it was collected meanwhile.
        IntegrityError: Something is damaged or missing; the message says of which layer.
    """
    try:
        yield
    except IntegrityError as exc:
        if not _is_named(rooms, composition):
            base = composition.base
            raise Conflict(
                f"a part of {base.run}@{base.step} was collected while it was read; nothing was written",
                hint=f"layerstore log {base.run} lists what is kept; repeat the command if it is there",
            ) from exc
        if isinstance(lost := exc.facts.get("object_id"), str):
            entry = _entry_of(rooms, composition, lost)
            of_base = references_to(rooms, [composition.base])[0]
            called = of_base if entry is None else references_to(rooms, [entry.origin])[0]
            exc.locate(of_base if entry is None else f"{entry.layer} of {called}")
            if entry is not None and saved_at(rooms, entry.origin) is None:
                called = of_base  # collected: the layer has outlived the commit that saved it
            option = " --read-data" if exc.hint == DAMAGED_HINT else ""  # what is missing is found without
            exc.hint = f"layerstore verify {called}{option} says which composites still stand; or {exc.hint}"
        raise


def _entry_of(rooms: Rooms, composition: Composition, lost: str) -> LayerEntry | None:
    """Return the layer that the object *lost* belongs to; None where it is of the base: a rank's state, say."""
    for entry in composition.layers:
        if entry.version.id == lost or _has_object(rooms, entry, lost):
            return entry
    return None


def _has_object(rooms: Rooms, entry: LayerEntry, lost: str) -> bool:
    try:
        return any(stored.ref.id == lost for stored in rooms.version_of(entry).objects)
    except IntegrityError:
        return False  # lost itself: then nobody has come to its objects


def _is_named(rooms: Rooms, composition: Composition) -> bool:
    """Whether all that *composition* names is named in the store too; what cannot be read may name anything."""
    left = {entry.version.id for entry in composition.layers} | {state.id for state in composition.base.states}
    try:
        for record in _records(rooms):
            left -= {entry.version.id for entry in record.layers} | {state.id for state in record.states}
            if not left:
                return True
    except IntegrityError:
        return True
    return False


def _records(rooms: Rooms) -> Iterator[CommitRecord]:
    for pin in readable_pins(rooms):
        yield pin.record
    for run in rooms.records.runs():
        for name in reversed(rooms.records.names(run)):
            try:
                yield rooms.records.read(name).record
            except IntegrityError:
                if rooms.records.is_there(name):
                    raise  # damaged, and not collected in this very moment
