"""What was lost while it was read: to a collection, which is no damage and has another remedy; else of which layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from layerstore.compose import Composition
from layerstore.errors import DAMAGED_HINT, Conflict, IntegrityError
from layerstore.gc.mark import readable_pins
from layerstore.history.needs import objects_of_state
from layerstore.history.past import saved_at
from layerstore.history.references import references_to
from layerstore.layers import typed
from layerstore.model import BlobRef, CommitRecord, LayerEntry
from layerstore.storage.rooms import Rooms


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
        lost = exc.facts.get("object_id")
        needing = _needing(rooms, composition, lost) if isinstance(lost, str) else []
        if not _is_named(rooms, composition, needing):
            base = composition.base
            raise Conflict(
                f"a part of {base.run}@{base.step} was collected while it was read; nothing was written",
                hint=f"layerstore log {typed(base.run)} lists what is kept; repeat the command if it is there",
            ) from exc
        if isinstance(lost, str):
            entry = next((each for each in needing if isinstance(each, LayerEntry)), None)
            of_base = references_to(rooms, [composition.base])[0]
            called = of_base if entry is None else references_to(rooms, [entry.origin])[0]
            exc.locate(of_base if entry is None else f"{entry.layer} of {called}")
            if entry is not None and saved_at(rooms, entry.origin) is None:
                called = of_base  # collected: the layer has outlived the commit that saved it
            option = " --read-data" if exc.hint == DAMAGED_HINT else ""  # what is missing is found without
            # Of a pin the base may be gone: then there is no reference to narrow it by.
            narrow = f" {typed(called)}" if saved_at(rooms, composition.base) is not None else ""
            exc.hint = f"layerstore verify{narrow}{option} says which composites still stand; or {exc.hint}"
        raise


def _needing(rooms: Rooms, composition: Composition, lost: str) -> list[LayerEntry | BlobRef]:
    """Return the layers and the ranks' states of *composition* that the object *lost* belongs to, as far as known."""
    entries = [each for each in composition.layers if each.version.id == lost or _has_object(rooms, each, lost)]
    return [*entries, *(each for each in composition.base.states if each.id == lost or _has_part(rooms, each, lost))]


def _has_object(rooms: Rooms, entry: LayerEntry, lost: str) -> bool:
    try:
        return any(stored.ref.id == lost for stored in rooms.version_of(entry).objects)
    except IntegrityError:
        return False  # lost itself: then nobody has come to its objects


def _has_part(rooms: Rooms, state: BlobRef, lost: str) -> bool:
    try:
        return any(ref.id == lost for ref in objects_of_state(rooms.state(state)))
    except IntegrityError:
        return False


def _is_named(rooms: Rooms, composition: Composition, needing: Sequence[LayerEntry | BlobRef]) -> bool:
    """
    Whether one of those *needing* what is lost is named in the store; where they are not known, all that there is.

    Beside what is lost, *composition* may have layers that nothing names any more and that lie there all the same.
    What cannot be read may name anything.
    """
    wanted = {_blob(each) for each in (needing or (*composition.layers, *composition.base.states))}
    left = set(wanted)
    try:
        for record in _records(rooms):
            left -= {*map(_blob, record.layers), *map(_blob, record.states)}
            if not left or (needing and left != wanted):
                return True
    except IntegrityError:
        return True
    return False


def _blob(of: LayerEntry | BlobRef) -> str:
    return of.version.id if isinstance(of, LayerEntry) else of.id


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
