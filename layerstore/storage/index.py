"""
The index: one row per commit, enough to plan a composite without reading a record.

It is never the truth. Every value has a checksum, the index can be rebuilt from the records at any time, and no answer
depends on a row being there, so damage costs only time.

Entries (docs/reference/format.md, section 7):
    header              which store, schema and format this index is of
    layers/DIGEST       layer names and a lineage that rows share
    run/RUN             the name of the run that hashes to RUN
    step/RUN STEP ID    the row of one commit
Anything that follows from rows (their order, what is hidden, which attempts exist) is derived on demand and never
stored, so the index cannot contradict itself.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from layerstore.format import DIGEST_BYTES, FORMAT, Plain, digest, pack, unpack_known
from layerstore.model import BlobRef, Commit, CommitId, Fork, LayerEntry, ObjectId, Origin
from layerstore.storage.commits import RecordName
from layerstore.storage.environment import Environment, IndexTransaction, IndexUnusable

SCHEMA = 4
_HEADER_KEY = b"header"
_LAYERS = b"layers/"
_RUN = b"run/"
# Sorts last, so that the rows of a long run are appended, which fills LMDB's pages.
_STEP = b"step/"
_ROW_KEY = struct.Struct(f">{len(_STEP)}s{DIGEST_BYTES}sQ{DIGEST_BYTES}s")
# Attempt, save number, digest of the model (layers' names and lineage), count of superseded commits.
_ROW_HEAD = struct.Struct(f">QQ{DIGEST_BYTES}sI")


class RecordRow(NamedTuple):
    """The index's row for one record: all that a plan needs."""

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
    """Each layer's version and origin, packed, since few rows are asked for them."""

    @property
    def name(self) -> RecordName:
        """The record's name."""
        return RecordName(self.run, self.step, self.id)

    @property
    def file_name(self) -> str:
        """The name of the record's file."""
        return f"{self.step}.{self.id}"

    @property
    def is_full(self) -> bool:
        """Whether this commit itself saved every layer."""
        return all(self.saved)

    @property
    def saved(self) -> tuple[bool, ...]:
        """For each layer, whether this commit itself saved it rather than inherited it."""
        _, kind, kinds = _unpacked(self.versions)
        own = (self.run, self.attempt, self.step)
        is_own = [tuple(each[2:5]) == own for each in kinds]
        return tuple(is_own[number] for number in kind)

    @property
    def counted(self) -> tuple[bool, ...]:
        """For each layer, whether the optimizer's update count is known."""
        _, kind, kinds = _unpacked(self.versions)
        is_counted = [each[1] is not None for each in kinds]
        return tuple(is_counted[number] for number in kind)

    def entries(self, layers: Collection[str] | None = None) -> dict[str, LayerEntry]:
        """Return the record's entries for its layers, or for those of *layers* that it has."""
        ids, kind, kinds = _unpacked(self.versions)
        found = {}
        for place, layer in enumerate(self.layer_names):
            if layers is None or layer in layers:
                size_bytes, optimizer_step, run, attempt, step, save_number = kinds[kind[place]]
                version = ObjectId(ids[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES].hex())
                found[layer] = LayerEntry(
                    layer=layer,
                    version=BlobRef(id=version, size_bytes=size_bytes),
                    origin=Origin(run=run, attempt=attempt, step=step, save_number=save_number),
                    optimizer_step=optimizer_step,
                )
        return found

    def without_moments(self) -> "RecordRow":
        """Return the commit's row after its moments are dropped."""
        entries = self.entries().values()
        return self._replace(versions=packed_versions(replace(entry, optimizer_step=None) for entry in entries))


_Shared = tuple[tuple[str, ...], tuple[Fork, ...]]
_Packed = tuple[bytes, list[int], list[tuple[int, int | None, str, int, int, int]]]


def _unpacked(versions: bytes) -> _Packed:
    return cast(_Packed, unpack_known(versions, what="a row of the index"))


def packed_versions(entries: Iterable[LayerEntry]) -> bytes:
    """Pack *entries* for a row; values that many layers share are written once."""
    entries = tuple(entries)
    kinds: dict[tuple[Plain, ...], int] = {}
    kind: list[Plain] = []
    for entry in entries:
        origin = entry.origin
        common = (
            entry.version.size_bytes,
            entry.optimizer_step,
            origin.run,
            origin.attempt,
            origin.step,
            origin.save_number,
        )
        kind.append(kinds.setdefault(common, len(kinds)))
    ids = b"".join(bytes.fromhex(entry.version.id) for entry in entries)
    return pack([ids, kind, [list(common) for common in kinds]])


def row_of(commit: Commit) -> RecordRow:
    """Return the row that *commit* has in every index."""
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
            IndexUnusable: It is damaged, belongs to another store or schema, or cannot be opened here.
        """
        # It includes the format, so that a migration invalidates all old indexes, even on other nodes.
        self._context = pack({"store": store_id, "schema": SCHEMA, "format": FORMAT})
        self._shared: dict[bytes, _Shared] = {}
        self._environment = Environment(directory)
        try:
            self._check_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the index; calling it twice is harmless."""
        self._environment.close()

    def check_process(self) -> None:
        """Raise Internal if the index is closed, or was opened before a fork."""
        self._environment.environment()

    # -- reading -------------------------------------------------------------------------------------------------

    def rows(self, run: str, names: Iterable[RecordName] | None = None) -> dict[str, RecordRow]:
        """
        Return the rows of *run* by record file name, or those of its records *names* that have one.

        Raises:
            IndexUnusable: One of them is damaged.
        """
        with self._environment.reading() as transaction:
            if names is None:
                return dict(self._rows(transaction, run, transaction.scan(_STEP + _run_key(run))))
            found = ((key, transaction.get(key)) for key in map(_row_key, names))
            return dict(self._rows(transaction, run, ((key, data) for key, data in found if data is not None)))

    def runs(self) -> set[str]:
        """Return the names of all runs that have rows."""
        with self._environment.reading() as transaction:
            named = [self._opened(key, data).decode() for key, data in transaction.scan(_RUN)]
            return {run for run in named if next(transaction.scan(_STEP + _run_key(run)), None)}

    def _rows(
        self, transaction: IndexTransaction, run: str, found: Iterable[tuple[bytes, bytes]]
    ) -> Iterator[tuple[str, RecordRow]]:
        size_bytes = _ROW_HEAD.size
        for key, data in found:  # a long run has ten thousand, so avoid calls here
            payload = self._opened(key, data)
            attempt, save_number, shared, count = _ROW_HEAD.unpack_from(payload)
            _, _, step, digest_of_record = _ROW_KEY.unpack(key)
            commit_id = digest_of_record.hex()
            supersedes: tuple[CommitId, ...] = ()
            if count:
                ends = range(size_bytes + DIGEST_BYTES, size_bytes + count * DIGEST_BYTES + 1, DIGEST_BYTES)
                supersedes = tuple(CommitId(payload[end - DIGEST_BYTES : end].hex()) for end in ends)
            layer_names, lineage = self._shared.get(shared) or self._read_shared(transaction, shared)
            versions = payload[size_bytes + count * DIGEST_BYTES :]
            # RecordRow(…), but without the call of its Python __new__.
            row = tuple.__new__(
                RecordRow,
                (run, step, commit_id, attempt, lineage, save_number, supersedes, layer_names, versions),
            )
            yield f"{step}.{commit_id}", row

    def _read_shared(self, transaction: IndexTransaction, shared: bytes) -> "_Shared":
        key = _LAYERS + shared
        data = transaction.get(key)
        if data is None:
            raise IndexUnusable("the index is damaged: the names of some layers are missing")
        names, forks = cast(
            "tuple[list[str], list[list[int]]]", unpack_known(self._opened(key, data), what="a row of the index")
        )
        lineage = tuple(Fork(attempt=attempt, step=step) for attempt, step in forks)
        return self._shared.setdefault(shared, (tuple(names), lineage))

    # -- writing -------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[RecordRow]) -> None:
        """Add *rows* in one transaction."""

        def put(transaction: IndexTransaction) -> None:
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
        found: list[RecordName] = []

        def delete(transaction: IndexTransaction) -> None:
            found[:] = [name for name in names if transaction.delete(_row_key(name))]

        self._change(delete)
        return found

    def _change(self, work: Callable[[IndexTransaction], None]) -> None:
        if not self._environment.read_only:
            self._environment.change(work)

    def _put(self, transaction: IndexTransaction, key: bytes, payload: bytes) -> None:
        if transaction.get(key) is None:
            transaction.put(key, self._sealed(key, payload))

    # -- the rest ------------------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        expected = self._sealed(_HEADER_KEY, self._context)
        with self._environment.reading() as transaction:
            data = transaction.get(_HEADER_KEY)
            empty = data is None and next(transaction.scan(b""), None) is None
        if data == expected:
            return
        if not empty or self._environment.read_only:
            raise IndexUnusable("the index belongs to another store, another version, or has lost its header")
        self._environment.change(lambda transaction: transaction.put(_HEADER_KEY, expected))

    def _sealed(self, key: bytes, payload: bytes) -> bytes:
        return payload + digest(self._context + key + payload)

    def _opened(self, key: bytes, data: bytes) -> bytes:
        """Check *data*, the value at *key*, and return its payload."""
        payload = data[:-DIGEST_BYTES]
        if not data.endswith(digest(self._context + key + payload)):
            raise IndexUnusable("the index is damaged: a checksum does not match its bytes")
        return payload


def _run_key(run: str) -> bytes:
    return digest(run.encode())


def _row_key(name: RecordName) -> bytes:
    return _ROW_KEY.pack(_STEP, _run_key(name.run), name.step, bytes.fromhex(name.id))
