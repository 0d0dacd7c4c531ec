"""
Verify: is everything there, and is every byte as it was written?

Quick: every record and pin by its checksum, every blob by its hash, every object by its size,
and the index against the records. With *read_data* also every object's bytes.
Nothing is changed, and one fault does not hide another.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.limits import WORKERS_MAX
from layerstore.model import BlobRef, CommitRecord
from layerstore.ops.needs import objects_of_state, objects_of_version
from layerstore.ops.progress import Progress
from layerstore.ops.refs import Resolved
from layerstore.ops.rooms import Rooms
from layerstore.storage.objects import missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not as it was written."""

    kind: str
    """``record``, ``pin``, ``version``, ``state``, ``object``, ``index`` or ``stranger``."""
    id: str
    path: str
    reason: str
    needed_by: tuple[str, ...]
    """Commits and pins that cannot be composed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a verify found."""

    damaged: tuple[Damage, ...]
    orphans: int
    """Objects that nothing names: harmless, collected later."""
    records: int
    """Commits and pins that were read."""
    objects: int
    bytes_read: int

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damaged


@dataclass(slots=True)
class _Found:
    """What the walk over the records turned up; shared by threads."""

    needed: dict[BlobRef, dict[str, None]] = field(default_factory=dict)
    """Every object with the commits and pins that need it, in order."""
    damaged: list[Damage] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def need(self, ref: BlobRef, by: Iterable[str]) -> None:
        """Note that the commits and pins *by* need *ref*."""
        self.needed.setdefault(ref, {}).update(dict.fromkeys(by))


def verify(rooms: Rooms, *, only: Resolved | None = None, read_data: bool = False, progress: Progress) -> Verdict:
    """Check the store, or what *only* needs; return everything that is wrong."""
    found = _Found()
    holders = _holders(rooms, found) if only is None else {_called(only): only.record}
    _walk(rooms, holders, found)
    bytes_read = _check_objects(rooms, found, read_data=read_data, progress=progress)
    orphans = 0
    if only is None:
        _check_index(rooms, found)
        named = {ref.id for ref in found.needed}
        orphans = sum(object_id not in named for object_id, _ in rooms.objects.ids())
    return Verdict(
        damaged=tuple(found.damaged),
        orphans=orphans,
        records=len(holders),
        objects=len(found.needed),
        bytes_read=bytes_read,
    )


def _called(resolved: Resolved) -> str:
    return resolved.pin or f"{resolved.record.run}@{resolved.record.step}"


def _holders(rooms: Rooms, found: _Found) -> dict[str, CommitRecord]:
    """Read every record and pin; return the sound ones by what a user calls them."""
    holders: dict[str, CommitRecord] = {}
    for run in rooms.records.runs():
        for name in rooms.records.names(run):
            path = rooms.layout.name(rooms.layout.record(name.run, name.step, name.id))
            try:
                record = rooms.records.read(name).record
            except LayerstoreError as exc:
                found.damaged.append(_damage("record", name.id, path, exc, (f"{name.run}@{name.step}",)))
            else:
                called = f"{name.run}@{name.step}"
                holders[called if called not in holders else f"{called} ({name.id[:12]})"] = record
    for pin in rooms.records.pin_names():
        try:
            holders[pin] = rooms.records.read_pin(pin).record
        except LayerstoreError as exc:
            found.damaged.append(_damage("pin", pin, rooms.layout.name(rooms.layout.pin(pin)), exc, (pin,)))
    for stranger in rooms.records.strangers():
        reason = IntegrityError("it is not a record and nothing reads it")
        found.damaged.append(_damage("stranger", stranger.name, rooms.layout.name(stranger), reason, ()))
    return holders


def _damage(kind: str, object_id: str, path: str, problem: LayerstoreError, needed_by: Iterable[str]) -> Damage:
    return Damage(kind=kind, id=object_id, path=path, reason=str(problem), needed_by=tuple(needed_by))


def _walk(rooms: Rooms, holders: dict[str, CommitRecord], found: _Found) -> None:
    """Read every version and state blob once; note all objects that they name."""
    versions: dict[BlobRef, list[str]] = {}
    states: dict[BlobRef, list[str]] = {}
    for called, record in holders.items():
        for entry in record.layers:
            versions.setdefault(entry.version, []).append(called)
        for state in record.states:
            states.setdefault(state, []).append(called)
    _walk_blobs(rooms, found, "version", versions, lambda ref: objects_of_version(rooms.version(ref)))
    _walk_blobs(rooms, found, "state", states, lambda ref: objects_of_state(rooms.state(ref)))


def _walk_blobs(
    rooms: Rooms,
    found: _Found,
    kind: str,
    blobs: dict[BlobRef, list[str]],
    objects_of: Callable[[BlobRef], Iterable[BlobRef]],
) -> None:
    for ref, needed_by in blobs.items():
        found.need(ref, needed_by)
        try:
            for part in objects_of(ref):
                found.need(part, needed_by)
        except LayerstoreError as exc:
            found.damaged.append(_damage(kind, ref.id, _object_path(ref), exc, needed_by))


def _object_path(ref: BlobRef) -> str:
    """Say where *ref* should be: for people, and for ids that are none too."""
    return f"objects/{ref.id[:2]}/{ref.id}"


def _check_objects(rooms: Rooms, found: _Found, *, read_data: bool, progress: Progress) -> int:
    already = {damage.id for damage in found.damaged}
    refs = [ref for ref in found.needed if ref.id not in already]
    total = sum(ref.size_bytes for ref in refs) if read_data else 0
    progress.start("verify", total)

    def check(ref: BlobRef) -> None:
        try:
            if rooms.objects.find(ref) is None:
                raise missing(ref)
            if read_data:
                _verify_twice(rooms, ref)
                progress.advance(ref.size_bytes)
        except LayerstoreError as exc:
            with found.guard:
                found.damaged.append(_damage("object", ref.id, _object_path(ref), exc, found.needed[ref]))

    with ThreadPoolExecutor(WORKERS_MAX) as pool:
        list(pool.map(check, refs))
    return total


def _verify_twice(rooms: Rooms, ref: BlobRef) -> None:
    """Read once more what seems damaged: a passing fault of memory or bus is not the disk's."""
    try:
        rooms.objects.verify(ref)
    except IntegrityError:
        rooms.objects.verify(ref)


def _check_index(rooms: Rooms, found: _Found) -> None:
    for run in sorted({*rooms.catalog.runs(), *rooms.catalog.remembered_runs()}):
        for name in rooms.catalog.vanished(run):
            problem = IntegrityError("the record has vanished; the index remembers it")
            path = rooms.layout.name(rooms.layout.record(name.run, name.step, name.id))
            found.damaged.append(_damage("record", name.id, path, problem, (f"{name.run}@{name.step}",)))
        for difference in rooms.catalog.differences(run):
            problem = IntegrityError(difference)
            found.damaged.append(_damage("index", run, "manifest", problem, ()))
