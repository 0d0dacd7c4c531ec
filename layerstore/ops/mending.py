"""
Repair, the deed: what is damaged is taken out of the way, and what there is a sound copy of is written back.

Nothing is ever removed: damaged files go to ``quarantine/``, with a log of what and why that is written before they do.
It may be stopped at any moment and run again: each step leaves what the next run finds
(docs/reference/format.md, section 6.13).
"""

import contextlib
import errno as errnos
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from layerstore.errors import Conflict, IntegrityError, LayerstoreError, StorageIO
from layerstore.model import BlobRef, Commit, CommitRecord, ObjectId, Quarantined, QuarantineLog
from layerstore.ops.claims import claim
from layerstore.ops.damage import Damage, is_readable
from layerstore.ops.fall_back import execute_fall_backs
from layerstore.ops.given_up import lost_pins
from layerstore.ops.needs import objects_of_state, objects_of_version
from layerstore.ops.progress import Progress
from layerstore.ops.repair import (
    FoundPin,
    Object,
    Record,
    RepairPlan,
    healed_object,
    healed_pin,
    healed_record,
    plan_repair,
    read_again,
    unsound,
)
from layerstore.ops.repaired import Healed, Repaired, Request
from layerstore.ops.rooms import Rooms
from layerstore.storage.holders import Hold
from layerstore.storage.objects import ObjectWriter
from layerstore.storage.parts import name_at

# Records name blobs, and blobs objects: each look finds what the last one has made readable. No store needs more.
_LOOKS_MAX = 20


def execute_repair(rooms: Rooms, request: Request, *, progress: Progress) -> Repaired:
    """
    Do what `plan_repair` finds, and raise as that does.

    Then it looks once more: what was written back may name more that is damaged.
    If it raises, what was done stays done, and another repair goes on from there.

    Raises:
        Locked: A collection or another repair is under way.
    """
    rooms.prepare_writing()
    with rooms.lock_gc() as hold:
        plan = plan_repair(rooms, request, progress=progress)
        work = Work(rooms, rooms.quarantine.next_id(), hold)
        lost = dict.fromkeys(plan.outcome.lost_records)
        shown_again = dict.fromkeys(plan.outcome.shown_again)

        def look_again() -> RepairPlan:
            # Bytes that were read need not be read again; what was written back names others.
            new = work.newly_named if request.read_data else set()
            return plan_repair(rooms, replace(request, read_data=False), also_read=new, progress=progress)

        for _ in range(_LOOKS_MAX):
            if not (plan.has_work and work.do(plan)):
                break
            plan = look_again()
            lost |= dict.fromkeys([*work.kept, *plan.outcome.lost_records])
            shown_again |= dict.fromkeys(plan.outcome.shown_again)
        else:
            raise IntegrityError(
                f"after {_LOOKS_MAX} looks there is still something to repair; what was done stays done",
                hint="layerstore verify --read-data lists the damage; something keeps doing it, or repeat this",
            )
        if plan.outcome.fell_back:
            plan = look_again()  # what hides a commit is not decided by one look
        fell_back = execute_fall_backs(rooms, plan.outcome.fell_back, hold=hold)
        return replace(
            plan.outcome,
            quarantine=work.quarantine_id if work.taken else None,
            quarantined=tuple(work.taken.values()),
            healed=tuple(work.healed),
            fell_back=fell_back,
            lost_records=tuple(name for name in lost if name in plan.outcome.held_back),
            shown_again=tuple(shown_again),
            reindexed=work.has_reindexed,
        )


class Work:
    """One repair under way. Each thing is looked at again before it is touched: others may have been faster."""

    def __init__(self, rooms: Rooms, quarantine_id: str, hold: Hold) -> None:
        self._rooms = rooms
        self._hold = hold
        self.quarantine_id = quarantine_id
        self.taken: dict[str, Quarantined] = {}
        self.healed: list[Healed] = []
        self.has_reindexed = False
        self.kept: list[str] = []
        """Commits that could not be written back: what is left of their records is in quarantine."""
        self.newly_named: set[ObjectId] = set()
        """What records and blobs that were written back name: until then nobody could look at it."""

    def do(self, plan: RepairPlan) -> bool:
        """Do what *plan* says; return whether anything has changed."""
        before = (len(self.taken), len(self.healed), self.has_reindexed)
        self._hold.check()
        self._publish_log(plan.outcome.quarantined)
        for record in plan.records:
            if record.is_there:
                self._restore_in_place(record)
        for each in plan.objects:
            self._heal(plan, each)
        for record in plan.records:
            if not record.is_there:
                self._restore_absent(record)
        for damage in plan.others:
            self._set_right(damage)
        for pin in plan.pins:
            self._restore_pin(pin)
        if plan.outcome.reindexed:
            if self._rooms.catalog.index_problem is None:
                with self._rooms.lock_index():
                    self._rooms.catalog.rebuild()
            self.has_reindexed = True
        return before != (len(self.taken), len(self.healed), self.has_reindexed)

    def _publish_log(self, files: Iterable[Quarantined]) -> None:
        """Write down what is about to be moved, if anything is; what a second look finds has a log of its own."""
        if not files:
            return
        if self.taken:
            self.quarantine_id = self._rooms.quarantine.next_id()
        self._rooms.quarantine.publish(QuarantineLog(id=self.quarantine_id, time_ns=time.time_ns(), files=tuple(files)))

    def _take_away(self, path: Path, *, kind: str, reason: str) -> bool:
        """Move *path* to the quarantine, and return whether it was there; gone meanwhile is as good."""
        self._hold.check()
        try:
            self._rooms.quarantine.move(path, quarantine_id=self.quarantine_id)
        except StorageIO as exc:
            if exc.errno != errnos.ENOENT:
                raise
            return False
        self._note_taken(path, kind, reason)
        return True

    def _note_taken(self, path: Path, kind: str, reason: str) -> None:
        name = self._rooms.layout.name(path)
        self.taken[name] = Quarantined(path=name, kind=kind, reason=reason)

    # -- records -------------------------------------------------------------------------------------------------

    def _restore_in_place(self, record: Record) -> None:
        """Write a damaged record back where there is a copy, else take it away."""
        rooms, name = self._rooms, record.name
        path = rooms.layout.record(name.run, name.step, name.id)
        if is_readable(lambda: rooms.records.read(name)):
            return  # healed meanwhile, or a fault that has passed
        if record.copy is not None and rooms.files.is_file(path):
            self._hold.check()
            rooms.quarantine.keep(path, quarantine_id=self.quarantine_id)
            self._note_taken(path, "record", record.reason)
        else:
            self._take_away(path, kind="record", reason=record.reason)
            rooms.catalog.forget([name])
        if record.copy is not None:
            with self._writer() as writer:
                self._claim(writer, record.copy.record)  # as far as it goes: no more than that was lost before
                self._write_back(record, record.copy, writer)

    def _restore_absent(self, record: Record) -> None:
        """Write back a record that has vanished or is in quarantine; keep what is left of it where that cannot be."""
        if record.comes_back and record.copy is not None:
            with self._writer() as writer:
                if self._claim(writer, record.copy.record):
                    self._write_back(record, record.copy, writer)
                    return
        if not record.is_kept:
            self._keep(record)

    def _keep(self, record: Record) -> None:
        rooms, name = self._rooms, record.name
        path = rooms.layout.record(name.run, name.step, name.id)
        data = b"" if record.copy is None else rooms.records.encode(record.copy)
        self._hold.check()
        rooms.quarantine.write(path, data, quarantine_id=self.quarantine_id)
        self._note_taken(path, "record", record.reason)
        self.kept.append(f"{name.run}@{name.step}")

    def _writer(self) -> ObjectWriter:
        return ObjectWriter(self._rooms.layout, self._rooms.files, self._rooms.objects)

    def _claim(self, writer: ObjectWriter, record: CommitRecord) -> bool:
        """Claim what *record* names, as far as it is there; return whether all is."""
        by_one = [
            *(partial(claim, entries=[entry]) for entry in record.layers),
            *(partial(claim, entries=(), states=[state]) for state in record.states),
        ]
        is_all = True
        for claim_one in by_one:
            try:
                claim_one(self._rooms, writer)
            except Conflict:
                is_all = False
        return is_all

    def _write_back(self, record: Record, copy: Commit, writer: ObjectWriter) -> None:
        self._hold.check()
        self._rooms.records.publish(copy)
        writer.look_again()  # what is gone all the same, the next look finds
        self.healed.append(healed_record(self._rooms, record))
        self._note_all_named(copy.record)

    def _note_all_named(self, record: CommitRecord) -> None:
        for entry in record.layers:
            self._note_named(entry.version, self._of_version)
        for state in record.states:
            self._note_named(state, self._of_state)

    def _note_named(self, ref: BlobRef, objects_of: Callable[[BlobRef], list[BlobRef]]) -> None:
        self.newly_named.add(ref.id)
        # One that is damaged is found by the next look, and what it names after that.
        with contextlib.suppress(LayerstoreError):
            self.newly_named |= {each.id for each in objects_of(ref)}

    def _of_version(self, ref: BlobRef) -> list[BlobRef]:
        return objects_of_version(self._rooms.version(ref))

    def _of_state(self, ref: BlobRef) -> list[BlobRef]:
        return objects_of_state(self._rooms.state(ref))

    # -- objects -------------------------------------------------------------------------------------------------

    def _heal(self, plan: RepairPlan, each: Object) -> None:
        """Take an object's damaged bytes away, and write it afresh where there is a copy."""
        rooms, ref = self._rooms, each.ref
        for path in unsound(rooms, ref):
            self._take_away(path, kind="object", reason=each.reason)
        if rooms.files.exists(rooms.layout.object(ref.id)):
            return  # ingested again meanwhile
        copy = plan.healing.object(ref)
        if copy is not None:
            self._hold.check()
            plan.healing.put_back(ref, copy)
            self.healed.append(healed_object(rooms, replace(each, origin=copy.origin)))
            kind = each.damage.kind if each.damage is not None else "object"
            if kind in {"version", "state"}:
                self._note_named(ref, self._of_version if kind == "version" else self._of_state)

    # -- the rest ------------------------------------------------------------------------------------------------

    def _set_right(self, damage: Damage) -> None:
        """Take away a pin, a part, a log of a collection or a stranger, unless it is sound by now."""
        rooms, path = self._rooms, self._rooms.layout.root / damage.path
        if damage.kind != "stranger" and is_readable(lambda: read_again(rooms, damage)):
            return
        if self._take_away(path, kind=damage.kind, reason=damage.reason) and damage.kind == "part":
            # Whoever waits for it learns that it will not come.
            name = name_at(path)
            assert name is not None, "verify has found it by its name"
            rooms.parts.publish_failure(name, "its part was damaged, and a repair has put it into quarantine")

    def _restore_pin(self, pin: FoundPin) -> None:
        """Write a lost pin back, unless it was given up or named again meanwhile, or a run has its name."""
        rooms, name = self._rooms, pin.copy.name
        with self._writer() as writer:
            if not self._claim(writer, pin.copy.record):
                return
            self._hold.check()
            is_lost = any(lost.name == name for lost in lost_pins(rooms)) and not rooms.records.names(name)
            if is_lost and rooms.records.restore_pin(pin.copy):
                writer.look_again()  # what is gone all the same, the next look finds
                self.healed.append(healed_pin(rooms, pin))
                self._note_all_named(pin.copy.record)
