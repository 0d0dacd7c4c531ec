"""
Repair, the plan: what is damaged, what sound copies there are, what is lost, and what can fall back to older versions.

Nothing is written here; `layerstore.check.mending` does what is planned.
"""

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from layerstore.errors import IntegrityError, LayerstoreError, Unsupported
from layerstore.format.envelope import was
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.model import BlobRef, Commit, ObjectId, Pin, Quarantined
from layerstore.check.damage import Costs, Damage, has_passed, holder_of_pin, holders_of, problem_of
from layerstore.check.fall_back import plan_fall_backs
from layerstore.check.given_up import is_hidden, lost_pins, lost_records
from layerstore.check.healing import Absent, Healing
from layerstore.progress import Progress
from layerstore.history.references import references_to
from layerstore.check.reingests import reingests
from layerstore.check.repaired import Healed, PinElsewhere, Repaired, Request
from layerstore.storage.rooms import Rooms
from layerstore.check.verify import Verdict, verify
from layerstore.storage.checks import missing
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow
from layerstore.storage.parts import name_at

_OF_OBJECTS = frozenset({"version", "state", "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record that is damaged, has vanished, or is in quarantine."""

    name: RecordName
    reason: str
    is_there: bool
    is_quarantined: bool
    is_kept: bool
    """Whether all that is left of it is in quarantine."""
    is_hidden: bool
    """Whether a sound record hides it: then nobody needs it back."""
    copy: Commit | None
    origin: str
    absent: tuple[BlobRef, ...] = ()
    """What it needs, is not there, and has a sound copy."""
    lost: tuple[BlobRef, ...] = ()
    """What it needs and nobody has."""

    @property
    def comes_back(self) -> bool:
        """Whether it is written back. What rotted at its place is, whatever became of the objects that it names."""
        return self.copy is not None and (self.is_there or not self.lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """An object that is damaged or gone."""

    ref: BlobRef
    damage: Damage | None
    """None where it is only needed by a record that comes back."""
    origin: str | None
    """Where there is a sound copy."""
    is_whole: bool = False
    """Whether its bytes are what its name says: then what names it is wrong, or it is for a newer layerstore."""

    @property
    def reason(self) -> str:
        """What is wrong with what lies at its place."""
        return "its bytes are not those that its name says" if self.damage is None else self.damage.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPin:
    """A pin that is damaged or in quarantine, as a copy has it."""

    copy: Pin
    origin: str
    is_same: bool
    """Whether what is left of ours proves that it was this one: it may have been moved since the copy was made."""
    absent: tuple[BlobRef, ...] = ()
    """What it needs, is not there, and has a sound copy."""
    lost: tuple[BlobRef, ...] = ()
    """What it needs and nobody has."""

    @property
    def comes_back(self) -> bool:
        """Whether it is written back."""
        return self.is_same and not self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """What is to be done, and all that was needed to find out."""

    outcome: Repaired
    verdict: Verdict
    healing: Healing
    records: tuple[Record, ...]
    pins: tuple[FoundPin, ...]
    """Those that are written back."""
    objects: tuple[Object, ...]
    others: tuple[Damage, ...]
    """Pins, parts, logs of collections and strangers."""

    @property
    def has_work(self) -> bool:
        """Whether anything in the store is to be changed, older versions of layers aside."""
        outcome = self.outcome
        return bool(outcome.quarantined or outcome.healed or outcome.reindexed)


def plan_repair(
    rooms: Rooms, request: Request, *, also_read: Collection[ObjectId] = (), progress: Progress
) -> RepairPlan:
    """
    Find out what is damaged, and what can be done; nothing is written.

    The objects *also_read* are read even where not all are.
    """
    healing = Healing(rooms, request.sources)
    verdict = verify(rooms, read_data=request.read_data, also_read=also_read, progress=progress)
    newer, damaged = _newer(rooms, verdict.damaged)
    verdict = replace(verdict, damaged=damaged)
    records = tuple(_records(rooms, healing, verdict))
    others = tuple(damage for damage in verdict.damaged if damage.kind not in {"record", "index", *_OF_OBJECTS})
    found_pins = list(_pins(rooms, healing, others))
    pins = tuple(pin for pin in found_pins if pin.comes_back)
    absent = [ref for record in records if record.comes_back for ref in record.absent]
    absent += [ref for pin in pins for ref in pin.absent]
    objects = tuple(_objects(rooms, healing, verdict, absent))
    files = [*_record_files(rooms, records), *_object_files(rooms, objects), *_other_files(others)]
    healed = [
        *(healed_record(rooms, each) for each in records if each.comes_back),
        *(healed_object(rooms, each) for each in objects if each.origin is not None),
        *(healed_pin(rooms, each) for each in pins),
    ]
    told = _told(rooms, verdict=verdict, records=records, objects=objects, request=request, found_pins=found_pins)
    newer_names = tuple(damage.path for damage in newer)
    outcome = replace(
        told,
        quarantined=tuple(files),
        healed=tuple(healed),
        elsewhere=tuple(healing.elsewhere(missed={each.name for each in records})),
        newer=newer_names,
    )
    return RepairPlan(
        outcome=outcome, verdict=verdict, healing=healing, records=records, pins=pins, objects=objects, others=others
    )


def _newer(rooms: Rooms, damaged: Iterable[Damage]) -> tuple[list[Damage], tuple[Damage, ...]]:
    """Return what of *damaged* is none, and the others."""
    newer: list[Damage] = []
    others: list[Damage] = []
    for damage in damaged:
        is_newer = isinstance(problem_of(partial(read_again, rooms, damage)), Unsupported)
        (newer if is_newer else others).append(damage)
    return newer, tuple(others)


def read_again(rooms: Rooms, damage: Damage) -> None:
    """Read what *damage* is of once more, if it is a record, pin, part or log of a collection; raises as that does."""
    path = rooms.layout.root / damage.path
    if damage.kind == "record":
        name = rooms.records.name_at(path)
        if name is not None:
            rooms.records.read(name)
    elif damage.kind == "pin":
        rooms.records.read_pin(damage.id)
    elif damage.kind == "part":
        part = name_at(path)
        if part is not None:
            rooms.parts.find(*part)
    elif damage.kind == "collection":
        for damaged, problem in rooms.garbage.damaged_plans():
            if damaged == path:
                raise problem


# -- what can be done ----------------------------------------------------------------------------------------------


def _records(rooms: Rooms, healing: Healing, verdict: Verdict) -> Iterable[Record]:
    reasons: dict[RecordName, str] = {}
    for damage in verdict.damaged:
        if damage.kind == "record":
            name = rooms.records.name_at(rooms.layout.root / damage.path)
            if name is not None:
                reasons[name] = damage.reason
    for lost in lost_records(rooms):
        reasons.setdefault(lost.name, "it is in quarantine")
    for name, reason in reasons.items():
        found = healing.record(name)
        absent = healing.absent(found[0].record) if found else Absent(to_be_had=(), lost=())
        yield Record(
            name=name,
            reason=reason,
            is_there=rooms.records.is_there(name),
            is_quarantined=healing.is_quarantined(name),
            # Of what lies there only a damaged twin may be left, while there is a copy elsewhere.
            is_kept=healing.is_kept(name) if found else healing.is_quarantined(name),
            is_hidden=is_hidden(rooms, name),
            copy=found[0] if found else None,
            origin=found[1] if found else "",
            absent=absent.to_be_had,
            lost=absent.lost,
        )


def _pins(rooms: Rooms, healing: Healing, others: Iterable[Damage]) -> Iterable[FoundPin]:
    """Yield each lost pin as the first copy has it that proves to be the same; else as all have it."""
    quarantined = {lost.name: lost.path for lost in lost_pins(rooms)}  # of several the one that was taken last
    left = {name: path for name, path in quarantined.items() if not rooms.files.exists(rooms.layout.pin(name))}
    left |= {damage.id: rooms.layout.root / damage.path for damage in others if damage.kind == "pin"}
    for name, path in sorted(left.items()):
        if rooms.records.names(name):
            continue  # a run is called so by now, and no reference would find the pin
        copies = list(healing.pins(name))
        damaged = _what_is_left(rooms, path)
        same = next((each for each in copies if was(damaged, rooms.records.encode_pin(each[0]))), None)
        if same is None:
            yield from (FoundPin(copy=copy, origin=origin, is_same=False) for copy, origin in copies)
        else:
            absent = healing.absent(same[0].record)
            yield FoundPin(copy=same[0], origin=same[1], is_same=True, absent=absent.to_be_had, lost=absent.lost)


def _what_is_left(rooms: Rooms, path: Path) -> bytes:
    with contextlib.suppress(LayerstoreError):
        return rooms.files.read(path, size_bytes_max=RECORD_BYTES_MAX)
    return b""


def _objects(rooms: Rooms, healing: Healing, verdict: Verdict, absent: Iterable[BlobRef]) -> Iterable[Object]:
    seen: set[tuple[str, BlobRef]] = set()
    for damage in (*verdict.damaged, *verdict.hidden):
        if damage.kind not in _OF_OBJECTS or damage.size_bytes is None:
            continue
        ref = BlobRef(id=ObjectId(damage.id), size_bytes=damage.size_bytes)
        if (damage.kind, ref) in seen:
            continue
        seen.add((damage.kind, ref))
        # Whole, and not what a record takes it for: no copy is any better.
        is_whole = rooms.objects.is_whole(rooms.layout.object(ref.id), ref.id)
        if is_whole and has_passed(partial(_check_use, rooms, damage, ref)):
            continue
        copy = None if is_whole else healing.object(ref)
        yield Object(ref=ref, damage=damage, origin=copy.origin if copy else None, is_whole=is_whole)
    known = {ref for _, ref in seen}
    for ref in absent:
        if ref not in known:
            known.add(ref)
            copy = healing.object(ref)
            yield Object(ref=ref, damage=None, origin=copy.origin if copy else None)


def _check_use(rooms: Rooms, damage: Damage, ref: BlobRef) -> None:
    """Make sure that *ref*, whose bytes are whole, is all that those who name it take it for."""
    if rooms.objects.find(ref) is None:
        raise missing(ref)
    if damage.kind == "version":
        layer = rooms.version(ref).layer
        for taken in (each for cost in damage.costs for each in cost.layers if each != layer):
            raise IntegrityError(f"version {ref.id} is of layer {layer!r}, a commit has it as {taken!r}")
    elif damage.kind == "state":
        rooms.state(ref)


def _record_files(rooms: Rooms, records: Iterable[Record]) -> Iterable[Quarantined]:
    for each in records:
        # What has vanished is kept there too, as far as there is anything left of it.
        if each.is_there or not (each.comes_back or each.is_kept):
            path = rooms.layout.name(rooms.layout.record(each.name.run, each.name.step, each.name.id))
            yield Quarantined(path=path, kind="record", reason=each.reason)


def _object_files(rooms: Rooms, objects: Iterable[Object]) -> Iterable[Quarantined]:
    for each in objects:
        for path in unsound(rooms, each.ref):
            yield Quarantined(path=rooms.layout.name(path), kind="object", reason=each.reason)


def unsound(rooms: Rooms, ref: BlobRef) -> list[Path]:
    """Return what lies where *ref* should be, and is not what its name says; a record may be wrong about its size."""
    places = dict.fromkeys(rooms.objects.places(ref.id))
    return [path for path in places if rooms.files.exists(path) and not rooms.objects.is_whole(path, ref.id)]


def _other_files(others: Iterable[Damage]) -> Iterable[Quarantined]:
    for damage in others:
        yield Quarantined(path=damage.path, kind=damage.kind, reason=damage.reason)


def healed_record(rooms: Rooms, record: Record) -> Healed:
    """Return *record*, which has a copy, as one that is healed."""
    assert record.copy is not None
    path = rooms.layout.record(record.name.run, record.name.step, record.name.id)
    size_bytes = len(rooms.records.encode(record.copy))
    return Healed(kind="record", path=rooms.layout.name(path), origin=record.origin, size_bytes=size_bytes)


def healed_object(rooms: Rooms, each: Object) -> Healed:
    """Return the object *each*, which has a copy, as one that is healed."""
    path = rooms.layout.object_name(each.ref.id)
    return Healed(kind="object", path=path, origin=each.origin or "", size_bytes=each.ref.size_bytes)


def healed_pin(rooms: Rooms, pin: FoundPin) -> Healed:
    """Return *pin* as one that is healed."""
    path = rooms.layout.name(rooms.layout.pin(pin.copy.name))
    return Healed(kind="pin", path=path, origin=pin.origin, size_bytes=len(rooms.records.encode_pin(pin.copy)))


# -- what is lost --------------------------------------------------------------------------------------------------


def _told(
    rooms: Rooms,
    *,
    verdict: Verdict,
    records: Sequence[Record],
    objects: Sequence[Object],
    request: Request,
    found_pins: Iterable[FoundPin],
) -> Repaired:
    """Return what is lost once everything is healed that can be, and what falls back."""
    gone = [each for each in objects if each.origin is None and each.damage is not None]
    blobs = {blob for each in gone if each.damage is not None for blob in each.damage.blobs}
    holders = holders_of(rooms, blobs) if blobs else {}
    # A blob that is whole is not lost: a newer layerstore may read it, or others name it rightly.
    whole = {each.ref for each in gone if each.is_whole and each.damage is not None and each.damage.kind != "object"}
    falls = plan_fall_backs(rooms, holders, blobs - whole) if request.fall_back else None
    fell_back = falls.possible if falls else ()
    replaced = {each.hurt for each in fell_back}
    left = {
        name: holder
        for name, holder in holders.items()
        if holder.is_shown and (holder.pin is not None or holder.row.id not in replaced)
    }
    hurt = {pin.copy.name: holder_of_pin(pin.copy, pin.lost) for pin in found_pins if pin.lost}
    left |= hurt
    blobs |= {blob for holder in hurt.values() for blob in holder.lost}
    gone_records = [each for each in records if not each.comes_back]
    lost = [each for each in gone_records if not each.is_hidden]
    newly_lost = [_called(each) for each in lost if each.is_there or not each.is_quarantined]
    healed = {pin.copy.name for pin in found_pins if pin.comes_back}
    damaged_pins = {damage.id for damage in verdict.damaged if damage.kind == "pin"} - healed
    held_back = {_called(each) for each in lost} | damaged_pins | ({pin.name for pin in lost_pins(rooms)} - healed)
    return Repaired(
        fell_back=fell_back,
        cannot_fall_back=falls.impossible if falls else {},
        lost=Costs(left)(blobs),
        lost_records=(*newly_lost, *sorted(damaged_pins)),
        reingest=reingests(rooms, left.values(), [each.name for each in lost]),
        held_back=tuple(sorted(held_back)),
        pins_elsewhere=tuple(
            PinElsewhere(
                name=pin.copy.name, reference=f"{pin.copy.record.run}@{pin.copy.record.step}", store=pin.origin
            )
            for pin in found_pins
            if not pin.is_same
        ),
        shown_again=_shown_again(rooms, gone_records),
        reindexed=any(damage.kind in {"index", "record"} for damage in verdict.damaged)
        or any(each.comes_back for each in records),
    )


def _called(record: Record) -> str:
    return f"{record.name.run}@{record.name.step}"


def _shown_again(rooms: Rooms, records: Sequence[Record]) -> tuple[str, ...]:
    """Return the commits that show once the *records*, which are lost, hide them no more; as far as the index knows."""
    found: list[RecordRow] = []
    for run in sorted({each.name.run for each in records}):
        view = rooms.catalog.find(run)
        if view is None:
            continue
        gone = {each.name.id for each in records if each.name.run == run}
        indexed = {row.id: row for row in rooms.catalog.indexed(run).values()}
        before = replace(view, rows=indexed | view.rows)
        after = replace(view, rows={of: row for of, row in view.rows.items() if of not in gone})
        shown = {row.id for row in before.visible}
        found += [row for row in after.visible if row.id not in shown]
    return tuple(references_to(rooms, found))
