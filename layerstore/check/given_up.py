"""
What repairs have put into quarantine and what nobody has yet given up: it holds collections back.

What a lost record or pin needs is not known, so nothing may go. It is given up by name, or there is a sound one again.
A record that a sound one hides is given up, too: it was replaced or dropped, and a collection takes such a commit, with
what it alone needs, also where it is whole.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from layerstore.errors import LayerstoreError, NotFound
from layerstore.layers import parse_reference, typed
from layerstore.model import CommitId, CommitRecord, Quarantined
from layerstore.check.damage import is_readable
from layerstore.publish.hiding import WITHDRAWN
from layerstore.storage.rooms import Rooms
from layerstore.storage.commits import RecordName
from layerstore.storage.quarantine import LostPin, LostRecord

# What lies there and no log tells of, by the folder that it was in.
_KINDS = {"commits": "record", "pins": "pin", "objects": "object", "parts": "part", "gc": "collection"}

_COMMIT_ID = re.compile("[0-9a-f]{12,32}")


def lost_records(rooms: Rooms) -> list[LostRecord]:
    """Return the quarantined records of which there is no sound one, and that no sound one hides."""
    return [lost for lost in rooms.quarantine.records() if _is_lost(rooms, lost.name)]


def _is_lost(rooms: Rooms, name: RecordName) -> bool:
    return not (_is_sound(rooms, name) or is_hidden(rooms, name))


def _is_sound(rooms: Rooms, name: RecordName) -> bool:
    """
    Whether the record *name* can be read, or could be with a newer layerstore.

    Raises:
        StorageIO: It cannot be looked at just now, which says nothing of it.
    """
    return is_readable(partial(rooms.records.read, name))


def is_hidden(rooms: Rooms, name: RecordName) -> bool:
    """
    Whether a record that can be read supersedes *name*; the index only says which one to read.

    One that failed as it was published, and was withdrawn at once, has replaced nothing.
    """
    view = rooms.catalog.find(name.run)
    rows = () if view is None else view.rows.values()
    hiders = [row.name for row in rows if name.id in row.supersedes]
    return any(name.id in _superseded_by(rooms, hider) and not _is_withdrawn(rooms, hider) for hider in hiders)


def _superseded_by(rooms: Rooms, name: RecordName) -> tuple[CommitId, ...]:
    record = _record(rooms, name)
    return () if record is None else record.supersedes


def _is_withdrawn(rooms: Rooms, name: RecordName) -> bool:
    rows = rooms.catalog.view(name.run).rows.values()
    records = (_record(rooms, row.name) for row in rows if name.id in row.supersedes and not row.layer_names)
    return any(record is not None and WITHDRAWN in record.policy.decisions for record in records)


def _record(rooms: Rooms, name: RecordName) -> CommitRecord | None:
    try:
        return rooms.records.read(name).record
    except LayerstoreError:
        return None


def lost_at(rooms: Rooms, run: str, step: int) -> list[RecordName]:
    """Return the lost records of *run* at *step*: in quarantine, vanished, or damaged at their place."""
    view = rooms.catalog.find(run)
    damaged = () if view is None else view.damaged
    names = dict.fromkeys([*damaged, *(lost.name for lost in rooms.quarantine.records())])
    # Looked at by place first: each of those that are left is looked for in all rows of the run.
    return sorted(name for name in names if (name.run, name.step) == (run, step) and _is_lost(rooms, name))


def lost_pins(rooms: Rooms) -> list[LostPin]:
    """Return the quarantined pins of which there is no sound one."""
    sound = {pin.name for pin in rooms.records.readable_pins()}
    return [lost for lost in rooms.quarantine.pins() if lost.name not in sound]


def given_up_by(called: str) -> str:
    """Return the command that gives up *called*, a commit or a pin in quarantine."""
    if "@" in called:
        return f"layerstore drop {typed(called)} --quarantined"
    return f"layerstore pin --delete {typed(called)}"


def records_meant(rooms: Rooms, ref: str) -> list[LostRecord]:
    """
    Return the lost records that *ref* means: ``RUN@STEP``, or the beginning of a commit's id.

    Raises:
        NotFound: There is none.
    """
    lost = lost_records(rooms)
    if _COMMIT_ID.fullmatch(ref):
        found = [each for each in lost if each.name.id.startswith(ref)]
    else:
        reference = parse_reference(ref)
        found = [each for each in lost if (each.name.run, each.name.step) == (reference.name, reference.step)]
    if not found:
        there = sorted({f"{each.name.run}@{each.name.step}" for each in lost})
        raise NotFound(
            f"no record of {ref} is in quarantine; nothing was changed",
            hint=f"in quarantine: {', '.join(there[:10])}" if there else "layerstore repair --list says what is there",
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Something in quarantine."""

    quarantine: str
    """Under which name it lies there."""
    time_ns: int | None
    """When it was taken, by that writer's clock; None where no log says so."""
    path: str
    """Where it was, below the store."""
    kind: str
    """What it was taken for."""
    reason: str
    status: Literal["kept", "holds gc back", "given up"]


def kept(rooms: Rooms) -> list[Kept]:
    """Return what lies in quarantine, what was taken first first; a folder that was taken as a whole is one thing."""
    holding = {*(lost.path for lost in lost_records(rooms)), *(lost.path for lost in lost_pins(rooms))}
    found: dict[tuple[str, str, bool], Kept] = {}
    for quarantine_id in rooms.quarantine.ids():
        log = rooms.quarantine.log(quarantine_id)
        told = {} if log is None else {file.path: file for file in log.files}
        for place, path, is_given_up in rooms.quarantine.contents(quarantine_id):
            file = next((told[str(each)] for each in (place, *place.parents) if str(each) in told), None)
            if file is None:
                file = Quarantined(path=str(place), kind=_KINDS.get(place.parts[0], "file"), reason="no log says why")
            holds = not holding.isdisjoint((path, *path.parents))
            found[quarantine_id, file.path, is_given_up] = Kept(
                quarantine=quarantine_id,
                time_ns=None if log is None else log.time_ns,
                path=file.path,
                kind=file.kind,
                reason=file.reason,
                status="given up" if is_given_up else "holds gc back" if holds else "kept",
            )
    return list(found.values())
