"""
Stats: the logical, unique and physical size of a store.

*Logical* is the size of all visible commits if each were stored whole; *unique* counts every object once; both use
listed sizes. *Physical* is the size of the files on disk.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.format import commit_id
from layerstore.history import objects_of_state
from layerstore.json_fields import json_fields
from layerstore.model import (
    BlobRef,
    Commit,
    CommitId,
    CommitRecord,
    Kind,
    ObjectId,
    Pin,
)
from layerstore.progress import Progress
from layerstore.storage import Repository, RunView
from layerstore.units import size

VERSION, STATE, RECORD = "version", "state", "record"
"""Kinds besides those of layers' objects: version blobs; rank states with their objects; commit records and pins."""

_KINDS = (*(kind.value for kind in Kind), VERSION, STATE, RECORD)


@dataclass(slots=True, kw_only=True)
class Amount:
    """The count and the size of one kind of object, or of one layer."""

    _JSON: ClassVar = "logical_bytes unique_bytes"

    count: int = 0
    """The number of distinct objects or, for a layer, of its distinct versions."""
    logical_bytes: int = 0
    unique_bytes: int = 0


@dataclass(slots=True, kw_only=True)
class RunStats:
    """The bytes of one run."""

    run: str
    commits: int = 0
    logical_bytes: int = 0
    unique_bytes: int = 0
    own_bytes: int = 0
    """Unique bytes that no other counted run needs; all of them if only one run is counted."""


@dataclass(slots=True, kw_only=True)
class Unneeded:
    """Objects that no visible commit and no pin refers to."""

    objects: int
    bytes: int
    """On disk."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """The sizes of a store, or of one run."""

    _JSON: ClassVar = (
        "run commits pins logical_bytes unique_bytes physical_bytes saved_ratio unneeded missing runs kinds layers "
        "left_out"
    )

    run: str | None
    """The only run that was counted; None for the whole store."""
    pins: int = 0
    """Pins of mixtures, and of commits that are no longer visible; they count like commits."""
    physical_bytes: int = 0
    """Bytes on disk of the whole store, including an index inside it; for one run, of its objects and records."""
    runs: list[RunStats] = field(default_factory=list)
    kinds: dict[str, Amount] = field(default_factory=lambda: {kind: Amount() for kind in _KINDS})
    layers: dict[str, Amount] = field(default_factory=dict)
    unneeded: Unneeded | None = None
    """None for one run: other runs may need objects that this run does not."""
    missing: int = 0
    """The number of missing objects that are needed; `verify` lists them."""
    left_out: list[str] = field(default_factory=list)
    """What could not be read, and so is not counted."""

    def __repr__(self) -> str:
        sizes = f"logical {size(self.logical_bytes)}, needed {size(self.unique_bytes)}"
        missing = f", MISSING {self.missing}" if self.missing else ""
        return (
            f"<Stats of {self.run or 'the store'}: commits {self.commits}, {sizes}, "
            f"on disk {size(self.physical_bytes)}{missing}>"
        )

    @property
    def commits(self) -> int:
        """The number of visible commits."""
        return sum(run.commits for run in self.runs)

    @property
    def logical_bytes(self) -> int:
        """The size of all visible commits if each were stored whole."""
        return sum(run.logical_bytes for run in self.runs)

    @property
    def unique_bytes(self) -> int:
        """The size of what is needed, counting each object once."""
        return sum(amount.unique_bytes for amount in self.kinds.values())

    @property
    def saved_ratio(self) -> float:
        """The fraction of the logical bytes that need not be stored."""
        return 1 - self.unique_bytes / self.logical_bytes if self.logical_bytes else 0.0


def stats_fields(stats: Stats) -> dict[str, Any]:
    """Return *stats* as JSON fields; the ``own_bytes`` of a run counted alone are None, since they are unknown."""
    own = {} if stats.run is None else {"own_bytes": None}
    return json_fields(stats) | {
        "runs": [json_fields(run) | own for run in stats.runs],
        "kinds": [
            {"kind": name, "objects": amount.count} | json_fields(amount) for name, amount in stats.kinds.items()
        ],
        "layers": [
            {"layer": name, "versions": amount.count} | json_fields(amount) for name, amount in stats.layers.items()
        ],
    }


@dataclass(slots=True)
class _Tally:
    stats: Stats
    users: dict[ObjectId, int] = field(default_factory=dict)
    """Every needed object, and a bit for each run that needs it."""
    record_paths: list[Path] = field(default_factory=list)

    def add(self, ref: BlobRef, uses: dict[int, int], *amounts: Amount) -> None:
        """Count the object *ref* among *amounts*; *uses* has how often each run needs the object."""
        is_new = ref.id not in self.users
        for amount in amounts:
            amount.logical_bytes += sum(uses.values()) * ref.size_bytes
            if is_new:
                amount.count += 1
                amount.unique_bytes += ref.size_bytes
        for index, count in uses.items():
            run, bit, known = self.stats.runs[index], 1 << index, self.users.get(ref.id, 0)
            run.logical_bytes += count * ref.size_bytes
            if known & bit:
                continue
            run.unique_bytes += ref.size_bytes
            # The first run that needs an object owns it, until a second run needs it.
            if not known:
                run.own_bytes += ref.size_bytes
            elif known.bit_count() == 1:
                self.stats.runs[known.bit_length() - 1].own_bytes -= ref.size_bytes
            self.users[ref.id] = known | bit

    def add_record(self, index: int, repo: Repository, path: Path) -> None:
        """Count a record or pin, which belongs to one run alone."""
        size_bytes, records, run = repo.files.size(path) or 0, self.stats.kinds[RECORD], self.stats.runs[index]
        for amount in (records, run):
            amount.logical_bytes += size_bytes
            amount.unique_bytes += size_bytes
        records.count += 1
        run.own_bytes += size_bytes
        self.record_paths.append(path)


def count_bytes(repo: Repository, *, run: str | None = None, progress: Progress) -> Stats:
    """
    Count the bytes of the whole store, or those that *run* needs; damaged parts are left out and listed.

    Reads every version blob and state blob once. Raises NotFound if there is no such run.
    """
    stats = Stats(run=run)
    tally = _Tally(stats)
    versions: dict[tuple[BlobRef, int], int] = {}
    states: dict[tuple[BlobRef, int], int] = {}
    for index, record in _holders(repo, tally):
        for entry in record.layers:
            stats.layers.setdefault(entry.layer, Amount())
            versions[entry.version, index] = versions.get((entry.version, index), 0) + 1
        for state in record.states:
            states[state, index] = states.get((state, index), 0) + 1
    progress.start("stats", sum(ref.size_bytes for ref in {ref for ref, _ in (*versions, *states)}))
    for add, uses_of_kind in ((_add_version, versions), (_add_state, states)):
        for ref, uses in _by_blob(uses_of_kind):
            try:
                add(tally, repo, ref, uses)
            except LayerstoreError as exc:
                stats.left_out.append(str(exc))
            progress.advance(ref.size_bytes)
    _look_at_disk(repo, tally)
    return stats


# -- what is needed ------------------------------------------------------------------------------------------------


def _holders(repo: Repository, tally: _Tally) -> Iterator[tuple[int, CommitRecord]]:
    """Yield every visible commit, and every pin of anything else, with the index of its run."""
    stats = tally.stats
    visible: set[CommitId] = set()
    indexes: dict[str, int] = {}

    def index_of(run: str) -> int:
        if run not in indexes:
            indexes[run] = len(stats.runs)
            stats.runs.append(RunStats(run=run))
        return indexes[run]

    for view in views_shown(repo, stats.run):
        index = index_of(view.run)
        stats.left_out += [f"{name.run}@{name.step}: {problem}" for name, problem in view.damaged.items()]
        for commit in commits_of(repo, view, stats.left_out):
            visible.add(commit.id)
            stats.runs[index].commits += 1
            tally.add_record(index, repo, repo.layout.record(view.run, commit.record.step, commit.id))
            yield index, commit.record
    for name, pin in repo.records.pins():
        if not isinstance(pin, Pin):
            stats.left_out.append(f"pin {name}: {pin}")
        elif stats.run in {None, pin.record.run}:
            index = index_of(pin.record.run)
            tally.add_record(index, repo, repo.layout.pin(pin.name))
            if commit_id(pin.record) not in visible:
                stats.pins += 1
                yield index, pin.record


def views_shown(repo: Repository, run: str | None) -> list[RunView]:
    """Return the view of every run, or of *run* alone; raises NotFound if there is no such run."""
    return [repo.catalog.view(name) for name in (repo.catalog.runs() if run is None else [run])]


def commits_of(repo: Repository, view: RunView, problems: list[str]) -> Iterator[Commit]:
    """Yield the visible commits of *view*; note unreadable ones in *problems*."""
    for row in view.visible:
        try:
            yield repo.catalog.commit(row.name)
        except NotFound:
            continue  # gc has removed it in the meantime
        except IntegrityError as exc:
            problems.append(f"{row.run}@{row.step}: {exc}")


def _by_blob(uses: dict[tuple[BlobRef, int], int]) -> Iterator[tuple[BlobRef, dict[int, int]]]:
    """Yield each blob once, in the order of the object folders, with the runs that use it and how often."""
    keys = sorted(uses, key=lambda key: (key[0].id, key[0].size_bytes))
    for ref, group in groupby(keys, key=lambda key: key[0]):
        yield ref, {index: uses[ref, index] for _, index in group}


def _add_version(tally: _Tally, repo: Repository, ref: BlobRef, uses: dict[int, int]) -> None:
    version = repo.version(ref)
    layer = tally.stats.layers.setdefault(version.layer, Amount())
    versions = layer.count + 1
    for kind, part in [(VERSION, ref), *((stored.kind.value, stored.ref) for stored in version.named)]:
        tally.add(part, uses, tally.stats.kinds[kind], layer)
    # A layer's count is the number of its versions, but `add` has counted their objects.
    layer.count = versions


def _add_state(tally: _Tally, repo: Repository, ref: BlobRef, uses: dict[int, int]) -> None:
    for part in (ref, *objects_of_state(repo.state(ref))):
        tally.add(part, uses, tally.stats.kinds[STATE])


# -- what is on disk -----------------------------------------------------------------------------------------------


def _look_at_disk(repo: Repository, tally: _Tally) -> None:
    """Count the bytes on disk, the unneeded objects, and the needed objects that are missing."""
    stats, seen = tally.stats, set[Hashable]()
    present, unneeded = 0, Unneeded(objects=0, bytes=0)

    def take(file: tuple[Hashable, int] | None) -> int:
        """Return the bytes that a file adds: 0 if it is gone, or was counted under another name."""
        if file is None or file[0] in seen:
            return 0
        seen.add(file[0])
        return file[1]

    for object_id in repo.objects.ids():
        file = repo.objects.on_disk(object_id)
        if object_id in tally.users:
            present += 1
            stats.physical_bytes += take(file)
        elif stats.run is None:
            disk_bytes = take(file)
            stats.physical_bytes += disk_bytes
            unneeded.objects += 1
            unneeded.bytes += disk_bytes
    # A mirror lacks the bucket's other files, and the mirror's own other files do not belong to the bucket.
    paths = tally.record_paths if stats.run or repo.remote else _all_files(repo)
    stats.physical_bytes += sum(take(repo.files.on_disk(path)) for path in paths)
    stats.missing = len(tally.users) - present
    stats.unneeded = unneeded if stats.run is None else None


def _all_files(repo: Repository) -> Iterator[Path]:
    pending = [repo.layout.root]
    while pending:
        folder = pending.pop()
        for name in repo.files.names(folder):
            path = folder / name
            if repo.files.is_directory(path):
                pending.append(path)
            else:
                yield path
