"""
The index: one row per commit, enough to plan a composite without reading a record.

It is never the source of truth. Every value has a checksum, the index can be rebuilt from the records at any time, and
no answer depends on a row being present, so damage costs only time.

Entries (docs/reference/format.md, section 7):
    header              the store, schema and format of this index
    layers/DIGEST       layer names and a lineage, shared by rows
    run/RUN             the name of the run that hashes to RUN
    step/RUN STEP ID    the row of one commit
Anything that follows from rows (their order, what is hidden, which attempts exist) is derived on demand and never
stored, so the index cannot contradict itself.

Only this module uses lmdb, which has traps: a file must not be opened twice in a process, nor used across a fork; LMDB
waits forever for another writer; and it trusts the files that it maps, so ``lmdb_file.py`` checks them first. On a
network filesystem, mapped files differ between nodes, so such a store's index is on a local disk (``repository.py``).
"""

import contextlib
import os
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import lmdb

from layerstore.disk import lock
from layerstore.errors import Internal, LayerstoreError, Locked, StorageIO
from layerstore.format import FORMAT, Plain, pack, unpack
from layerstore.hashing import DIGEST_BYTES, digest
from layerstore.limits import INDEX_MAP_BYTES, INDEX_MAP_BYTES_MAX
from layerstore.model import BlobRef, Commit, CommitId, Fork, LayerEntry, ObjectId, Origin
from layerstore.storage.commits import RecordName
from layerstore.storage.lmdb_file import preallocate_lock_file, problem_in

SCHEMA = 5
_HEADER_KEY = b"header"
_LAYERS = b"layers/"
_RUN = b"run/"
# Sorts last, so that the rows of a long run are appended, which fills LMDB's pages.
_STEP = b"step/"
# Big-endian: LMDB compares keys byte by byte, and a run's rows must be in the order of steps.
_ROW_KEY = struct.Struct(f">{len(_STEP)}s{DIGEST_BYTES}sQ{DIGEST_BYTES}s")
# Attempt, save number, the DIGEST of the entry with layer names and lineage, count of superseded commits.
_ROW_HEAD = struct.Struct(f">QQ{DIGEST_BYTES}sI")
# LMDB itself would wait forever for another writer, even a suspended one.
_WRITER_DEADLINE_SECONDS = 10.0


class IndexUnusable(LayerstoreError):
    """The index cannot be used as it is; the records can."""


class RecordRow(NamedTuple):
    """The index's row for one record: everything that a plan needs."""

    run: str
    step: int
    id: CommitId
    attempt: int
    lineage: tuple[Fork, ...]
    save_number: int
    supersedes: tuple[CommitId, ...]
    layer_names: tuple[str, ...]
    """In the model's order; rows with the same names share one tuple."""
    versions: bytes
    """Each layer's version and origin; kept packed, since few rows need them."""

    @property
    def name(self) -> RecordName:
        """The record's name."""
        return RecordName(self.run, self.step, self.id)

    @property
    def file_name(self) -> str:
        """The name of the record's file."""
        return f"{self.step}.{self.id}"

    @property
    def version_ids(self) -> frozenset[bytes]:
        """The digests of its layers' versions; much faster than getting its `entries`."""
        ids = _unpacked(self.versions)[0]
        return frozenset(ids[at : at + DIGEST_BYTES] for at in range(0, len(ids), DIGEST_BYTES))

    @property
    def is_full(self) -> bool:
        """Whether this commit itself saved every layer."""
        return all(self.saved)

    @property
    def saved(self) -> tuple[bool, ...]:
        """For each layer, whether this commit itself saved it rather than inherited it."""
        _, kind, kinds = _unpacked(self.versions)
        own = (self.run, self.attempt, self.step)
        is_own = [tuple(facts[2:5]) == own for facts in kinds]
        return tuple(is_own[number] for number in kind)

    @property
    def counted(self) -> tuple[bool, ...]:
        """For each layer, whether the optimizer's update count is known."""
        _, kind, kinds = _unpacked(self.versions)
        is_counted = [facts[1] is not None for facts in kinds]
        return tuple(is_counted[number] for number in kind)

    @property
    def is_exact(self) -> bool:
        """Whether every layer is kept bit for bit."""
        return not any(facts[-1] for facts in _unpacked(self.versions)[2])

    def entries(self, layers: Collection[str] | None = None) -> dict[str, LayerEntry]:
        """Return the record's entries for all its layers, or for those in *layers*."""
        ids, kind, kinds = _unpacked(self.versions)
        entries = {}
        for place, layer in enumerate(self.layer_names):
            if layers is None or layer in layers:
                size_bytes, optimizer_step, run, attempt, step, save_number, compact = kinds[kind[place]]
                version = ObjectId(ids[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES].hex())
                entries[layer] = LayerEntry(
                    layer=layer,
                    version=BlobRef(id=version, size_bytes=size_bytes),
                    origin=Origin(run=run, attempt=attempt, step=step, save_number=save_number),
                    optimizer_step=optimizer_step,
                    compact=compact,
                )
        return entries

    def without_moments(self) -> "RecordRow":
        """Return the row that the commit would have without its moments."""
        entries = self.entries().values()
        return self._replace(versions=packed_versions(replace(entry, optimizer_step=None) for entry in entries))


_Named = tuple[tuple[str, ...], tuple[Fork, ...]]
"""Layer names and a lineage."""
_Packed = tuple[bytes, list[int], list[tuple[int, int | None, str, int, int, int, int]]]


def _unpacked(versions: bytes) -> _Packed:
    return cast(_Packed, unpack(versions, what="a row of the index", is_canonical=True))


def packed_versions(entries: Iterable[LayerEntry]) -> bytes:
    """Pack *entries* for a row; values that many layers share are written once."""
    entries = tuple(entries)
    kinds: dict[tuple[Plain, ...], int] = {}
    kind: list[Plain] = []
    for entry in entries:
        origin = entry.origin
        saved_by = (origin.run, origin.attempt, origin.step, origin.save_number)
        common = (entry.version.size_bytes, entry.optimizer_step, *saved_by, entry.compact)
        kind.append(kinds.setdefault(common, len(kinds)))
    ids = b"".join(bytes.fromhex(entry.version.id) for entry in entries)
    return pack([ids, kind, [list(common) for common in kinds]])


def row_of(commit: Commit) -> RecordRow:
    """Return the index row of *commit*."""
    record = commit.record
    return RecordRow(
        run=record.run,
        step=record.step,
        id=commit.id,
        attempt=record.attempt,
        lineage=record.lineage,
        save_number=record.save_number,
        supersedes=record.supersedes,
        layer_names=tuple(entry.layer for entry in record.layers),
        versions=packed_versions(record.layers),
    )


class Index:
    """The open index of the store *store_id*."""

    def __init__(self, directory: Path, *, store_id: str) -> None:
        """
        Open the index in *directory*, making it if there is none.

        If the folder cannot be written, the index is read as it stands and changes have no effect.

        Raises:
            IndexUnusable: The index is damaged, belongs to another store or schema, or cannot be opened on this node.
        """
        # The context includes the format, so that a migration invalidates all old indexes, even on other nodes.
        self._context = pack({"store": store_id, "schema": SCHEMA, "format": FORMAT})
        self._named: dict[bytes, _Named] = {}
        self._directory = directory
        self._opened: _OpenIndex | None = _acquire(directory)
        self._is_read_only = self._opened.is_read_only
        try:
            self._check_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the index; calling it twice is harmless."""
        opened, self._opened = self._opened, None
        if opened is not None:
            _release(opened)

    def check_process(self) -> None:
        """Raise Internal if the index is closed, or was opened before a fork."""
        self._environment()

    # -- reading -------------------------------------------------------------------------------------------------

    def rows(self, run: str, names: Iterable[RecordName] | None = None) -> dict[str, RecordRow]:
        """
        Return the rows of *run*, or only the rows of its records *names*, by record file name.

        Raises:
            IndexUnusable: A row is damaged.
        """
        with self._transaction() as transaction:
            if names is None:
                return dict(self._rows(transaction, run, _scan(transaction, _STEP + _run_key(run))))
            rows = ((key, transaction.get(key)) for key in map(_row_key, names))
            return dict(self._rows(transaction, run, ((key, data) for key, data in rows if data is not None)))

    def runs(self) -> set[str]:
        """Return the names of all runs that have rows."""
        with self._transaction() as transaction:
            named = [self._unsealed(key, data).decode() for key, data in _scan(transaction, _RUN)]
            return {run for run in named if next(_scan(transaction, _STEP + _run_key(run)), None)}

    def _rows(self, transaction: Any, run: str, rows: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, RecordRow]]:
        size_bytes = _ROW_HEAD.size
        for key, data in rows:  # a long run has ten thousand rows, so avoid calls in this loop
            payload = self._unsealed(key, data)
            attempt, save_number, shared, count = _ROW_HEAD.unpack_from(payload)
            _, _, step, digest_of_record = _ROW_KEY.unpack(key)
            commit_id = digest_of_record.hex()
            supersedes: tuple[CommitId, ...] = ()
            if count:
                ends = range(size_bytes + DIGEST_BYTES, size_bytes + count * DIGEST_BYTES + 1, DIGEST_BYTES)
                supersedes = tuple(CommitId(payload[end - DIGEST_BYTES : end].hex()) for end in ends)
            layer_names, lineage = self._named.get(shared) or self._read_named(transaction, shared)
            versions = payload[size_bytes + count * DIGEST_BYTES :]
            # RecordRow(…), but without the call of its Python __new__.
            row = tuple.__new__(
                RecordRow,
                (run, step, commit_id, attempt, lineage, save_number, supersedes, layer_names, versions),
            )
            yield f"{step}.{commit_id}", row

    def _read_named(self, transaction: Any, shared: bytes) -> _Named:
        key = _LAYERS + shared
        data = transaction.get(key)
        if data is None:
            raise IndexUnusable("the index is damaged: the names of some layers are missing")
        names, forks = cast(
            "tuple[list[str], list[list[int]]]",
            unpack(self._unsealed(key, data), what="a row of the index", is_canonical=True),
        )
        lineage = tuple(Fork(attempt=attempt, step=step) for attempt, step in forks)
        return self._named.setdefault(shared, (tuple(names), lineage))

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[RecordRow]) -> None:
        """Add *rows* in one transaction."""

        def put(transaction: Any) -> None:
            for row in rows:
                forks: list[Plain] = [[fork.attempt, fork.step] for fork in row.lineage]
                shared = pack([list(row.layer_names), forks])
                hidden = b"".join(map(bytes.fromhex, row.supersedes))
                head = _ROW_HEAD.pack(row.attempt, row.save_number, digest(shared), len(row.supersedes))
                self._put(transaction, _LAYERS + digest(shared), shared)
                self._put(transaction, _RUN + _run_key(row.run), row.run.encode())
                self._put(transaction, _row_key(row.name), head + hidden + row.versions)

        self._change(put)

    def drop(self, names: Iterable[RecordName]) -> list[RecordName]:
        """Drop the rows of the records *names*; return the names that had a row."""
        dropped: list[RecordName] = []

        def delete(transaction: Any) -> None:
            dropped[:] = [name for name in names if transaction.delete(_row_key(name))]

        self._change(delete)
        return dropped

    def _put(self, transaction: Any, key: bytes, payload: bytes) -> None:
        # An existing value is identical: keys are hashes of their values, or belong to records, which never change.
        if transaction.get(key) is None:
            sealed = self._sealed(key, payload)
            # Append if possible: LMDB then fills its pages, and the index needs half as many.
            if not transaction.put(key, sealed, append=True):
                transaction.put(key, sealed)

    def _change(self, work: Callable[[Any], object]) -> None:
        """
        Run *work* in a transaction: its changes are durable once this returns; if *work* fails, nothing is changed.

        If the map is full, it grows and *work* is called once more.
        """
        if self._is_read_only:
            return
        try:
            self._change_once(work)
        except lmdb.MapFullError:
            self._grow()
            self._change_once(work)

    def _change_once(self, work: Callable[[Any], object]) -> None:
        # If another writer is stuck, this fails after the deadline, and the catalog makes a new index.
        turn = lock(self._directory / "writer.lock", what="the index", deadline_seconds=_WRITER_DEADLINE_SECONDS)
        try:
            with turn, self._transaction(write=True) as transaction:
                work(transaction)
        except (Locked, StorageIO) as exc:
            raise IndexUnusable(f"the index cannot be written: {exc}") from exc

    def _grow(self) -> None:
        environment = self._environment()
        size_bytes = environment.info()["map_size"] * 2
        if size_bytes > INDEX_MAP_BYTES_MAX:
            raise IndexUnusable(f"the index has reached its limit of {INDEX_MAP_BYTES_MAX} bytes")
        environment.set_mapsize(size_bytes)

    # -- the rest ------------------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        expected = self._sealed(_HEADER_KEY, self._context)
        with self._transaction() as transaction:
            data = transaction.get(_HEADER_KEY)
            empty = data is None and next(_scan(transaction, b""), None) is None
        if data == expected:
            return
        if not empty or self._is_read_only:
            raise IndexUnusable("the index belongs to another store, another version, or has lost its header")
        self._change(lambda transaction: transaction.put(_HEADER_KEY, expected))

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        environment = self._environment()
        try:
            try:
                transaction = environment.begin(write=write)
            except lmdb.MapResizedError:  # another process grew the map
                environment.set_mapsize(0)
                transaction = environment.begin(write=write)
            with transaction:
                yield transaction
        except lmdb.MapFullError:
            raise  # `_change` makes room
        except lmdb.Error as exc:
            # After a failed commit, the environment is suspect even if LMDB's next call succeeds.
            raise IndexUnusable(f"the index failed: {exc}") from exc

    def _environment(self) -> Any:
        """Return LMDB's own object; raise Internal if the index is closed, or was opened before a fork."""
        opened = self._opened
        if opened is None:
            raise Internal("the index was used after it was closed")
        if opened.pid != os.getpid():
            raise Internal(
                f"this store was opened in process {opened.pid} and is used in its child {os.getpid()}",
                hint="open the store again after the fork, or start workers with 'spawn'",
            )
        return opened.environment

    def _sealed(self, key: bytes, payload: bytes) -> bytes:
        return payload + digest(self._context + key + payload)

    def _unsealed(self, key: bytes, data: bytes) -> bytes:
        """Check *data*, the value at *key*, and return its payload."""
        payload = data[:-DIGEST_BYTES]
        if not data.endswith(digest(self._context + key + payload)):
            raise IndexUnusable("the index is damaged: a checksum does not match its bytes")
        return payload


def _scan(transaction: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries whose keys start with *prefix*, in order."""
    with transaction.cursor() as cursor:
        if not cursor.set_range(prefix):
            return
        for key, data in cursor:
            if not key.startswith(prefix):
                return
            yield key, data


def _run_key(run: str) -> bytes:
    return digest(run.encode())


def _row_key(name: RecordName) -> bytes:
    return _ROW_KEY.pack(_STEP, _run_key(name.run), name.step, bytes.fromhex(name.id))


# -- opening it ------------------------------------------------------------------------------------------------------


def engine_version() -> str:
    """Return the version of LMDB that makes new indexes."""
    return ".".join(map(str, lmdb.version(lib_version=0)))


def index_problem(folder: Path) -> str | None:
    """Try to make, write and read an index in *folder*; return the problem, or None if all of that works."""
    try:
        for _ in range(2):  # the first makes an index with a header, the second reads it
            Index(folder / "index", store_id="a trial").close()
    except IndexUnusable as exc:
        return str(exc)
    return None


# LMDB forbids opening a file twice in one process: the first close would drop the file's locks.
_open_environments: dict[tuple[int, int], "_OpenIndex"] = {}
_registry_guard = threading.Lock()


@dataclass(slots=True)
class _OpenIndex:
    environment: Any
    is_read_only: bool
    users: int = 0
    pid: int = field(default_factory=os.getpid)


def _acquire(directory: Path) -> _OpenIndex:
    with _registry_guard:
        try:
            if directory.is_symlink():
                raise IndexUnusable(f"{directory} is a link, which is not followed")
            directory.mkdir(parents=True, exist_ok=True)
            state = directory.stat()
        except OSError as exc:
            raise IndexUnusable(f"the index folder cannot be used: {exc}") from exc
        identity = (state.st_dev, state.st_ino)
        opened = _open_environments.get(identity)
        if opened is None or opened.pid != os.getpid():  # an environment inherited in a fork is the parent's
            is_read_only = not os.access(directory, os.W_OK)
            opened = _OpenIndex(_open_environment(directory, read_only=is_read_only), is_read_only)
            _open_environments[identity] = opened
        opened.users += 1
        return opened


def _release(opened: _OpenIndex) -> None:
    with _registry_guard:
        opened.users -= 1
        if opened.users or opened.pid != os.getpid():
            return  # a child must not close what its parent has open
        opened.environment.close()
        for identity, other in list(_open_environments.items()):
            if other is opened:
                del _open_environments[identity]


def _open_environment(directory: Path, *, read_only: bool) -> Any:
    _check_file(directory / "data.mdb")
    try:
        if not read_only:
            preallocate_lock_file(directory / "lock.mdb")
        environment = lmdb.open(
            str(directory),
            map_size=INDEX_MAP_BYTES,
            subdir=True,
            readonly=read_only,
            create=not read_only,
            metasync=True,
            sync=True,
            map_async=False,
            writemap=False,  # a stray write of this process cannot damage the file
            lock=True,
            max_dbs=0,
            mode=0o666,
            lib_version=0,
        )
        if not read_only:
            environment.reader_check()  # the slots of killed readers would keep old pages from being reused
    except (lmdb.Error, OSError) as exc:
        raise IndexUnusable(f"the index cannot be opened: {exc}") from exc
    return environment


def _check_file(path: Path) -> None:
    """Refuse a data file that could crash LMDB; a missing or empty file is fine, as LMDB makes a new one."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise IndexUnusable("the index is not a regular file")
        problem = problem_in(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise IndexUnusable(f"the index cannot be read: {exc}") from exc
    if problem is not None:
        raise IndexUnusable(f"the index is damaged: {problem}")
