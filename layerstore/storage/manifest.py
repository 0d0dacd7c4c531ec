"""
The index: an LMDB environment that finds records, and the only user of lmdb.

It is never the truth. Every row carries its own checksum and key, the whole is rebuilt from the records at any time,
and no answer depends on a row being there. So damage here costs time and nothing else.

Rows (docs/reference/format.md, section 7):
    header    what this index belongs to
    r KEY     a record's row: its attempt, what it hides, and step -> layer versions
    c KEY     the record's bytes, verbatim: for ``repair`` alone
KEY is run key (16 bytes) + step (8 bytes, big-endian) + commit id (16 bytes).
"""

import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify

from layerstore.errors import IntegrityError, Internal, LayerstoreError, Locked, StorageIO
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.format.hashing import digest
from layerstore.limits import MANIFEST_MAP_BYTES, MANIFEST_MAP_BYTES_MAX, PAGE_BYTES
from layerstore.model import Commit, CommitId, Fork
from layerstore.storage.commits import RecordName
from layerstore.storage.locks import lock

SCHEMA = 1
_HEADER_KEY = b"header"
_ROW, _COPY = b"r", b"c"
_LOCK_FILE_BYTES = 2 * PAGE_BYTES
# Where a meta page has the flags of LMDB's table of free pages and of ours, and what they are.
_FLAGS_AT, _FLAGS = (44, 92), [b"\x08\x00", b"\x00\x00"]
# Each try is spoilt only by another process's commit.
_PREFLIGHT_TRIES = 20
# LMDB itself would wait for ever for another writer, even one that was suspended.
_WRITER_DEADLINE_SECONDS = 10.0


class ManifestUnusable(LayerstoreError):
    """The index cannot be used as it is; the records can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """What the index says of one layer in one commit."""

    layer: str
    version: str
    step: int
    """At which the version was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRow:
    """What the index says of one record."""

    run: str
    step: int
    id: str
    attempt: int
    fork: Fork | None
    save_number: int
    supersedes: tuple[CommitId, ...]
    layers: tuple[LayerRow, ...]

    @property
    def name(self) -> RecordName:
        """Where the record is."""
        return RecordName(self.run, self.step, CommitId(self.id))


def row_of(commit: Commit) -> RecordRow:
    """Return the row that *commit* has in every index."""
    record = commit.record
    return RecordRow(
        run=record.run,
        step=record.step,
        id=commit.id,
        attempt=record.attempt,
        fork=record.fork,
        save_number=record.save_number,
        supersedes=record.supersedes,
        layers=tuple(
            LayerRow(layer=entry.layer, version=entry.version.id, step=entry.origin.step) for entry in record.layers
        ),
    )


# LMDB forbids opening one file twice in a process: its locks would be lost with the first close.
_open_environments: dict[tuple[int, int], "_Shared"] = {}
_registry_guard = threading.Lock()


@dataclass(slots=True)
class _Shared:
    environment: Any
    read_only: bool
    users: int = 0
    pid: int = field(default_factory=os.getpid)


class Manifest:
    """An open index of the store *store_id*."""

    def __init__(self, directory: Path, *, store_id: str) -> None:
        """
        Open the index in *directory*, making it where there is none.

        Where the folder cannot be written the index is read as it stands, and updates have no effect:
        whoever asks completes the answer from the records.

        Raises:
            ManifestUnusable: It is damaged, of another store or schema, or cannot be opened here.
        """
        self._store_id = store_id
        self._directory = directory
        self._shared: _Shared | None = _acquire(directory)
        self._read_only = self._shared.read_only
        try:
            self._check_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the index; twice is harmless."""
        shared, self._shared = self._shared, None
        if shared is not None:
            _release(self._directory, shared)

    # -- reading -------------------------------------------------------------------------------------------------

    def rows(self, run: str | None = None) -> dict[RecordName, RecordRow]:
        """
        Return the rows of *run*, or of every run.

        Raises:
            ManifestUnusable: One of them is not as it was written.
        """
        with self._transaction() as transaction:
            prefix = _ROW if run is None else _ROW + _run_key(run)
            found = {}
            for key, data in _scan(transaction, prefix):
                row = self._row(key, data)
                found[row.name] = row
            return found

    def run_keys(self) -> set[bytes]:
        """Return the keys of all runs that have rows."""
        with self._transaction() as transaction:
            return {key[1:17] for key, _ in _scan(transaction, _ROW)}

    def copy(self, name: RecordName) -> bytes | None:
        """Return the verbatim copy of the record *name*, for ``repair`` alone."""
        with self._transaction() as transaction:
            data = transaction.get(_key(_COPY, name))
        return None if data is None else self._unsealed(_key(_COPY, name), data)

    def _row(self, key: bytes, data: bytes) -> RecordRow:
        try:
            row = from_plain(RecordRow, unpack(self._unsealed(key, data), what="an index row"), what="an index row")
        except IntegrityError as exc:
            raise ManifestUnusable(f"the index is damaged: {exc}") from exc
        if _key(_ROW, row.name) != key:
            raise ManifestUnusable("the index is damaged: a row lies under another key")
        return row

    # -- writing -------------------------------------------------------------------------------------------------

    def update(self, *, add: Iterable[tuple[Commit, bytes]] = (), drop: Iterable[RecordName] = ()) -> None:
        """Add records, each with its bytes, and drop others, in one transaction."""
        rows = []
        for commit, data in add:
            row = row_of(commit)
            rows.append((_key(_ROW, row.name), pack(to_plain(row))))
            rows.append((_key(_COPY, row.name), data))
        gone = [_key(kind, name) for name in drop for kind in (_ROW, _COPY)]
        if not self._read_only:
            self._write(rows, gone)

    def _write(self, rows: list[tuple[bytes, bytes]], gone: list[bytes]) -> None:
        try:
            self._write_once(rows, gone)
        except lmdb.MapFullError:
            self._grow()
            self._write_once(rows, gone)

    def _write_once(self, rows: list[tuple[bytes, bytes]], gone: list[bytes]) -> None:
        with self._turn(), self._transaction(write=True) as transaction:
            for key in gone:
                transaction.delete(key)
            for key, payload in rows:
                transaction.put(key, self._sealed(key, payload))

    def _grow(self) -> None:
        environment = self._environment()
        size_bytes = environment.info()["map_size"] * 2
        if size_bytes > MANIFEST_MAP_BYTES_MAX:
            raise ManifestUnusable(f"the index has reached its limit of {MANIFEST_MAP_BYTES_MAX} bytes")
        environment.set_mapsize(size_bytes)

    # -- the rest ------------------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        expected = pack({"store": self._store_id, "schema": SCHEMA})
        with self._transaction() as transaction:
            data = transaction.get(_HEADER_KEY)
            empty = data is None and next(_scan(transaction, b""), None) is None
        if data is not None and self._unsealed(_HEADER_KEY, data) == expected:
            return
        if not empty or self._read_only:
            raise ManifestUnusable("the index belongs to another store, another version, or has lost its header")
        self._write_once([(_HEADER_KEY, expected)], [])

    def _sealed(self, key: bytes, payload: bytes) -> bytes:
        return seal(Envelope(store_id=self._store_id, name=f"index/{key.hex()}", payload=payload))

    def _unsealed(self, key: bytes, data: bytes) -> bytes:
        try:
            return unseal(data, name=f"index/{key.hex()}", store_id=self._store_id).payload
        except LayerstoreError as exc:
            raise ManifestUnusable(f"the index is damaged: {exc}") from exc

    def _environment(self) -> Any:
        shared = self._shared
        if shared is None:
            raise Internal("the index was used after it was closed")
        if shared.pid != os.getpid():
            raise Internal(
                f"this store was opened in process {shared.pid} and is used in its child {os.getpid()}",
                hint="open the store again after the fork, or start workers with 'spawn'",
            )
        return shared.environment

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for other writers, for a while: whoever is stuck keeps its index, the others make a new one."""
        try:
            with lock(self._directory / "writer.lock", what="the index", deadline_seconds=_WRITER_DEADLINE_SECONDS):
                yield
        except (Locked, StorageIO) as exc:
            raise ManifestUnusable(f"the index cannot be written: {exc}") from exc

    @contextlib.contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[Any]:
        """Yield a transaction that never outlives its function."""
        environment = self._environment()
        try:
            try:
                transaction = environment.begin(write=write)
            except lmdb.MapResizedError:  # another process has grown it
                environment.set_mapsize(0)
                transaction = environment.begin(write=write)
            with transaction:
                yield transaction
        except lmdb.MapFullError:
            raise
        except lmdb.Error as exc:
            # After any failed commit the environment is suspect, whatever LMDB says next time.
            raise ManifestUnusable(f"the index failed: {exc}") from exc


def _scan(transaction: Any, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    with transaction.cursor() as cursor:
        if not cursor.set_range(prefix):
            return
        for key, data in cursor:
            if not key.startswith(prefix):
                return
            yield key, data


def _run_key(run: str) -> bytes:
    return digest(run.encode())


def _key(kind: bytes, name: RecordName) -> bytes:
    return kind + _run_key(name.run) + name.step.to_bytes(8, "big") + bytes.fromhex(name.id)


def _acquire(directory: Path) -> _Shared:
    with _registry_guard:
        try:
            if directory.is_symlink():
                raise ManifestUnusable(f"{directory} is a link, which is not followed")
            directory.mkdir(parents=True, exist_ok=True)
            state = directory.stat()
        except OSError as exc:
            raise ManifestUnusable(f"the index folder cannot be used: {exc}") from exc
        identity = (state.st_dev, state.st_ino)
        shared = _open_environments.get(identity)
        if shared is None or shared.pid != os.getpid():
            read_only = not os.access(directory, os.W_OK)
            shared = _Shared(_open_environment(directory, read_only=read_only), read_only)
            _open_environments[identity] = shared
        shared.users += 1
        return shared


def _release(directory: Path, shared: _Shared) -> None:
    with _registry_guard:
        shared.users -= 1
        if shared.users or shared.pid != os.getpid():
            return
        shared.environment.close()
        for identity, other in list(_open_environments.items()):
            if other is shared:
                del _open_environments[identity]


def _open_environment(directory: Path, *, read_only: bool) -> Any:
    _preflight(directory)
    try:
        if not read_only:
            _preallocate_lock_file(directory / "lock.mdb")
        environment = lmdb.open(
            str(directory),
            map_size=MANIFEST_MAP_BYTES,
            subdir=True,
            readonly=read_only,
            create=not read_only,
            metasync=True,
            sync=True,
            map_async=False,
            writemap=False,
            lock=True,
            max_dbs=0,
            mode=0o666,
            lib_version=0,
        )
        if not read_only:
            environment.reader_check()
    except (lmdb.Error, OSError) as exc:
        raise ManifestUnusable(f"the index cannot be opened: {exc}") from exc
    return environment


def _preflight(directory: Path) -> None:
    """
    Refuse a data file that LMDB would trip over: what it maps and believes can kill the process instead of raising.

    LMDB's pages have no checksums, so their structure is walked, which takes 1 ms for each 100 commits.
    What a sound structure holds is checked row by row. An absent or empty file is fine, LMDB makes a new one.
    """
    path = directory / "data.mdb"
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ManifestUnusable("the index is not a regular file")
        for _ in range(_PREFLIGHT_TRIES):
            before = _meta_pages(path)
            problem = _structural_problem(path, before) if before else None
            if problem is None:
                return
            # Another process may have written meanwhile: pages are reused only after the next commit.
            if _meta_pages(path) == before:
                raise ManifestUnusable(f"the index is damaged: {problem}")
    except FileNotFoundError:
        return
    except OSError as exc:
        raise ManifestUnusable(f"the index cannot be read: {exc}") from exc


def _meta_pages(path: Path) -> bytes:
    """Return LMDB's two first pages: every commit changes one of them."""
    with path.open("rb") as file:
        return file.read(2 * PAGE_BYTES)


def _structural_problem(path: Path, meta_pages: bytes) -> str | None:
    # Duplicate keys, say, would be sound for the verifier, and LMDB fails an assertion over them: we use none.
    for page in (0, PAGE_BYTES):
        if [meta_pages[page + at : page + at + 2] for at in _FLAGS_AT] != _FLAGS:
            return "its tables have flags that they never get"
    try:
        problems = lmdb.verify.verify(str(path), subdir=False)  # type: ignore[no-untyped-call]  # it has no annotations
        return next(iter(problems), None)
    except lmdb.verify.VerifyError as exc:
        return str(exc)


def _preallocate_lock_file(path: Path) -> None:
    """Give the lock file its blocks: on a full disk LMDB's own way ends in a signal instead of an error."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.fstat(fd).st_size < _LOCK_FILE_BYTES:
            os.posix_fallocate(fd, 0, _LOCK_FILE_BYTES)
    finally:
        os.close(fd)
