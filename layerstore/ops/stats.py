"""
Stats: how much a store would hold, holds, and takes.

*Logical* is what every visible commit would take if each were stored whole, *unique* counts every object once,
both by listed sizes; *physical* is what the files take on disk.
Every record, version blob and state blob is read once; who wants the commits, too, may look at them on their way.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.format.records import commit_id
from layerstore.history.needs import objects_of_state
from layerstore.model import BlobRef, Commit, CommitId, CommitRecord, Kind, LayerVersion, ObjectId
from layerstore.progress import Progress
from layerstore.publish.pins import read_pins
from layerstore.storage.rooms import Rooms
from layerstore.storage.runview import RunView

VERSION, STATE, RECORD = "version", "state", "record"
"""Kinds besides those of objects: version blobs; all that is not a layer; commit records and pins."""

_KINDS = (*(kind.value for kind in Kind), VERSION, STATE, RECORD)

Tap = Callable[[RunView, Iterable[Commit]], Iterable[Commit]]
"""Is given a run's commits as they are read, and hands on every one."""


@dataclass(slots=True, kw_only=True)
class Amount:
    """How much of something there is."""

    count: int = 0
    """Different objects; of a layer, its different versions."""
    logical_bytes: int = 0
    unique_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RunStats:
    """One run."""

    run: str
    commits: int = 0
    logical_bytes: int = 0
    unique_bytes: int = 0
    own_bytes: int = 0
    """Of the unique ones, what no other of the runs that were counted needs: of one alone, all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unneeded:
    """Objects that no visible commit and no pin names."""

    objects: int
    bytes: int
    """On disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The answer."""

    run: str | None
    """The only run that was counted; None for the whole store."""
    commits: int
    pins: int
    """Pins of what is no visible commit: they are counted as commits are."""
    logical_bytes: int
    unique_bytes: int
    physical_bytes: int
    """Of the whole store with its index if that is inside; of one run, of its objects and records."""
    runs: tuple[RunStats, ...]
    kinds: dict[str, Amount]
    layers: dict[str, Amount]
    unneeded: Unneeded | None
    """None for one run: whether others need an object was not looked at."""
    missing: int
    """Objects that are needed and not there; `verify` names them."""
    left_out: tuple[str, ...]
    """What could not be read, so that it is in no figure."""

    @property
    def saved_ratio(self) -> float:
        """How much of the logical bytes need not be stored."""
        return 1 - self.unique_bytes / self.logical_bytes if self.logical_bytes else 0.0


@dataclass(slots=True)
class _Tally:
    """Sums over all that is needed."""

    runs: list[RunStats] = field(default_factory=list)
    kinds: dict[str, Amount] = field(default_factory=lambda: {kind: Amount() for kind in _KINDS})
    layers: dict[str, Amount] = field(default_factory=dict)
    users: dict[ObjectId, int] = field(default_factory=dict)
    """Every needed object, and which runs need it: one bit each."""
    left_out: list[str] = field(default_factory=list)
    record_paths: list[Path] = field(default_factory=list)

    def add(self, ref: BlobRef, uses: dict[int, int], *amounts: Amount) -> None:
        """Count the object *ref*, which each run of *uses* needs so many times, among *amounts*."""
        before = self.users.get(ref.id, 0)
        times = sum(uses.values())
        for amount in amounts:
            amount.logical_bytes += times * ref.size_bytes
            if not before:
                amount.count += 1
                amount.unique_bytes += ref.size_bytes
        for index, count in uses.items():
            run, bit = self.runs[index], 1 << index
            run.logical_bytes += count * ref.size_bytes
            known = self.users.get(ref.id, 0)
            if not known & bit:
                run.unique_bytes += ref.size_bytes
                self._shift_own(known, index, ref.size_bytes)
                self.users[ref.id] = known | bit

    def _shift_own(self, known: int, index: int, size_bytes: int) -> None:
        """The first run that needs an object has it for its own, until there is a second."""
        if not known:
            self.runs[index].own_bytes += size_bytes
        elif known.bit_count() == 1:
            self.runs[known.bit_length() - 1].own_bytes -= size_bytes

    def add_record(self, index: int, size_bytes: int) -> None:
        """Count a record or pin: nobody shares those."""
        for amount in (self.kinds[RECORD], self.runs[index]):
            amount.logical_bytes += size_bytes
            amount.unique_bytes += size_bytes
        self.kinds[RECORD].count += 1
        self.runs[index].own_bytes += size_bytes


def stats(rooms: Rooms, *, run: str | None = None, progress: Progress) -> Stats:
    """
    Count what the store holds, or what *run* needs of it.

    What is damaged is left out and named. Raises NotFound if there is no such run.
    """
    return count(rooms, views_of(rooms, run), run=run, progress=progress)


def views_of(rooms: Rooms, run: str | None) -> Iterator[RunView]:
    """Yield every run as it stands, or *run* alone; raises NotFound if there is no such run."""
    yield from map(rooms.catalog.view, rooms.catalog.runs() if run is None else [run])


def count(
    rooms: Rooms, views: Iterable[RunView], *, run: str | None, progress: Progress, tap: Tap | None = None
) -> Stats:
    """Count what *views* hold, which are all runs or *run* alone; their commits come through *tap*, run by run."""
    tally = _Tally()
    versions: dict[tuple[BlobRef, int], int] = {}
    states: dict[tuple[BlobRef, int], int] = {}
    pins = 0
    for index, is_pin, record in _holders(rooms, tally, views, run, tap or _untapped):
        pins += is_pin
        for entry in record.layers:
            tally.layers.setdefault(entry.layer, Amount())
            versions[entry.version, index] = versions.get((entry.version, index), 0) + 1
        for state in record.states:
            states[state, index] = states.get((state, index), 0) + 1
    progress.start("stats", sum(ref.size_bytes for ref in {ref for ref, _ in (*versions, *states)}))
    for ref, uses in _by_blob(versions):
        _read(tally, progress, ref, uses, lambda ref, uses: _add_version(tally, rooms, ref, uses))
    for ref, uses in _by_blob(states):
        _read(tally, progress, ref, uses, lambda ref, uses: _add_state(tally, rooms, ref, uses))
    physical_bytes, unneeded, missing = _on_disk(rooms, tally, whole=run is None)
    return Stats(
        run=run,
        commits=sum(of.commits for of in tally.runs),
        pins=pins,
        logical_bytes=sum(of.logical_bytes for of in tally.runs),
        unique_bytes=sum(amount.unique_bytes for amount in tally.kinds.values()),
        physical_bytes=physical_bytes,
        runs=tuple(tally.runs),
        kinds=tally.kinds,
        layers=tally.layers,
        unneeded=unneeded,
        missing=missing,
        left_out=tuple(tally.left_out),
    )


# -- what is needed ------------------------------------------------------------------------------------------------


def _holders(
    rooms: Rooms, tally: _Tally, views: Iterable[RunView], only: str | None, tap: Tap
) -> Iterator[tuple[int, bool, CommitRecord]]:
    """Yield every visible commit, and every pin of something else, with the index of its run."""
    visible: set[CommitId] = set()
    indexes: dict[str, int] = {}
    for view in views:
        tally.left_out += [f"{name.run}@{name.step}: {problem}" for name, problem in view.damaged.items()]
        index = _index_of(view.run, indexes, tally)
        for commit in tap(view, _commits(rooms, tally, view)):
            visible.add(commit.id)
            tally.runs[index].commits += 1
            _add_record(rooms, tally, index, rooms.layout.record(view.run, commit.record.step, commit.id))
            yield index, False, commit.record
    pins, damaged = read_pins(rooms)
    tally.left_out += [f"pin {name}: {problem}" for name, problem in damaged.items()]
    for pin in pins:
        if only not in {None, pin.record.run}:
            continue
        index = _index_of(pin.record.run, indexes, tally)
        _add_record(rooms, tally, index, rooms.layout.pin(pin.name))
        if commit_id(pin.record) not in visible:
            yield index, True, pin.record


def _commits(rooms: Rooms, tally: _Tally, view: RunView) -> Iterator[Commit]:
    for row in view.visible:
        try:
            yield rooms.catalog.commit(row.name)
        except NotFound:
            continue  # a collection has just removed it
        except IntegrityError as exc:
            tally.left_out.append(f"{row.run}@{row.step}: {exc}")


def _untapped(view: RunView, commits: Iterable[Commit]) -> Iterable[Commit]:
    return commits


def _index_of(run: str, indexes: dict[str, int], tally: _Tally) -> int:
    if run not in indexes:
        indexes[run] = len(tally.runs)
        tally.runs.append(RunStats(run=run))
    return indexes[run]


def _add_record(rooms: Rooms, tally: _Tally, index: int, path: Path) -> None:
    tally.add_record(index, rooms.files.size(path) or 0)
    tally.record_paths.append(path)


def _by_blob(uses: dict[tuple[BlobRef, int], int]) -> Iterator[tuple[BlobRef, dict[int, int]]]:
    """Yield each blob once, in the order of the folders, with the runs that use it and how often."""
    keys = sorted(uses, key=lambda key: (key[0].id, key[0].size_bytes))
    for ref, group in groupby(keys, key=lambda key: key[0]):
        yield ref, {index: uses[ref, index] for _, index in group}


def _read(
    tally: _Tally,
    progress: Progress,
    ref: BlobRef,
    uses: dict[int, int],
    count: Callable[[BlobRef, dict[int, int]], None],
) -> None:
    try:
        count(ref, uses)
    except LayerstoreError as exc:
        tally.left_out.append(str(exc))
    progress.advance(ref.size_bytes)


def _add_version(tally: _Tally, rooms: Rooms, ref: BlobRef, uses: dict[int, int]) -> None:
    version = rooms.version(ref)
    layer = tally.layers.setdefault(version.layer, Amount())
    layer.count += 1
    for kind, part in _parts(version, ref):
        of_layer = Amount()
        tally.add(part, uses, tally.kinds[kind], of_layer)
        layer.logical_bytes += of_layer.logical_bytes
        layer.unique_bytes += of_layer.unique_bytes


def _parts(version: LayerVersion, ref: BlobRef) -> Iterable[tuple[str, BlobRef]]:
    yield VERSION, ref
    for stored in version.objects:
        yield stored.kind.value, stored.ref


def _add_state(tally: _Tally, rooms: Rooms, ref: BlobRef, uses: dict[int, int]) -> None:
    for part in (ref, *objects_of_state(rooms.state(ref))):
        tally.add(part, uses, tally.kinds[STATE])


# -- what is there -------------------------------------------------------------------------------------------------


def _on_disk(rooms: Rooms, tally: _Tally, *, whole: bool) -> tuple[int, Unneeded | None, int]:
    """Return the bytes taken on disk, what nothing needs, and how many needed objects are not in their place."""
    taken = _Taken(rooms)
    unneeded = unneeded_bytes = present = 0
    for object_id, path in rooms.objects.ids():
        is_needed = object_id in tally.users
        present += is_needed
        if is_needed or whole:
            disk_bytes = taken.take(path)
            unneeded += not is_needed
            unneeded_bytes += 0 if is_needed else disk_bytes
    for path in _all_files(rooms) if whole else tally.record_paths:
        taken.take(path)
    missing = len(tally.users) - present
    return taken.disk_bytes, Unneeded(objects=unneeded, bytes=unneeded_bytes) if whole else None, missing


def _all_files(rooms: Rooms) -> Iterator[Path]:
    """Yield every file of the store, whatever it is; objects that were counted count no second time."""
    pending = [rooms.layout.root]
    while pending:
        folder = pending.pop()
        for name in rooms.files.names(folder):
            path = folder / name
            if rooms.files.is_directory(path):
                pending.append(path)
            else:
                yield path


class _Taken:
    """Bytes taken on disk, files with several names counted once."""

    def __init__(self, rooms: Rooms) -> None:
        self._files = rooms.files
        self._seen: set[tuple[int, int]] = set()
        self.disk_bytes = 0

    def take(self, path: Path) -> int:
        """Count the file *path*; return what it adds."""
        found = self._files.occupied(path)
        if found is None or found.identity in self._seen:
            return 0  # gone meanwhile, or counted under another name
        self._seen.add(found.identity)
        self.disk_bytes += found.disk_bytes
        return found.disk_bytes
