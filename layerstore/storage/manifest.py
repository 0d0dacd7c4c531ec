"""
The index: what it says of each record, in blocks of rows.

It is never the truth. Every block carries its own checksum and key, the whole is rebuilt from the records at any time,
and no answer depends on a row being there. So damage here costs time and nothing else.

Entries (docs/reference/format.md, section 7):
    header              what this index belongs to
    r RUN NUMBER        a block: some rows of the run whose name hashes to RUN, in the order in which they came
Whatever can be derived from rows (their order, what is hidden, which attempts there are) is derived when it is asked
for and never stored: so nothing here can contradict something else here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from layerstore.errors import IntegrityError, LayerstoreError
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.fields import from_plain, to_plain
from layerstore.format.hashing import digest
from layerstore.format.identity import FORMAT
from layerstore.model import Commit, CommitId, Fork
from layerstore.storage.commits import RecordName
from layerstore.storage.copies import Copies
from layerstore.storage.environment import Environment, ManifestUnusable, Transaction

SCHEMA = 3
_HEADER_KEY = b"header"
_BLOCK = b"r"
_COLLECTED_KEY = b"collected"
_RUN_KEY_BYTES = 16
# A block is written anew for each row that it gets, and read as a whole: about 10 kB for 80 layers.
BLOCK_ROWS = 64

# A file's name is STEP.ID, and an id has 32 digits.
_ID_BEGINS = -32
_STEP_ENDS = _ID_BEGINS - 1

# What a row says of one layer, one bit each.
SAVED = 1
COUNTED = 2
_SAVED_FLAGS = bytes([SAVED, SAVED | COUNTED])


class RecordRow(NamedTuple):
    """What the index says of one record: enough to find the ones that a plan needs, and none of their content."""

    run: str
    step: int
    id: CommitId
    attempt: int
    lineage: tuple[Fork, ...]
    save_number: int
    supersedes: tuple[CommitId, ...]
    layer_names: tuple[str, ...]
    """In the model's order; one and the same tuple in all rows that have it."""
    flags: bytes
    """``SAVED`` and ``COUNTED``, for each layer."""

    @property
    def name(self) -> RecordName:
        """Where the record is."""
        return RecordName(self.run, self.step, self.id)

    @property
    def file_name(self) -> str:
        """What the record's file is called."""
        return f"{self.step}.{self.id}"

    @property
    def saved(self) -> tuple[bool, ...]:
        """Whether each layer was saved by this very commit, and not inherited."""
        return tuple(bool(flag & SAVED) for flag in self.flags)

    @property
    def is_full(self) -> bool:
        """Whether this very commit saved every layer."""
        return not self.flags.translate(None, _SAVED_FLAGS)

    @property
    def counted(self) -> tuple[bool, ...]:
        """Whether it is known how many updates the optimizer had made to each layer."""
        return tuple(bool(flag & COUNTED) for flag in self.flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """What many rows of a block have in common."""

    attempt: int
    lineage: tuple[Fork, ...]
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """What one row of a block supersedes."""

    row: int
    commits: tuple[CommitId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """Some rows of a run, by columns: reading a column costs no more than reading one of its values."""

    run: str
    names: tuple[str, ...]
    kinds: tuple[RowKind, ...]
    kind: tuple[int, ...]
    save_numbers: tuple[int, ...]
    hiding: tuple[Hiding, ...]
    flags: tuple[bytes, ...]


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
        flags=bytes(
            SAVED * entry.saved_by(record) | COUNTED * (entry.optimizer_step is not None) for entry in record.layers
        ),
    )


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
        self._copies = Copies(directory / "copies", store_id=store_id)
        self._environment = Environment(directory)
        self.read_only = self._environment.read_only
        """Whether updates have no effect."""
        try:
            self._check_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the index; twice is harmless."""
        self._environment.close()

    def check_process(self) -> None:
        """Raise Internal if the index is closed, or was opened before a fork."""
        self._environment.check_process()

    # -- reading -------------------------------------------------------------------------------------------------

    def rows(self, run: str) -> dict[str, RecordRow]:
        """
        Return the rows of *run* by the names of their records' files.

        Raises:
            ManifestUnusable: One of them is not as it was written.
        """
        names: dict[tuple[str, ...], tuple[str, ...]] = {}
        found: dict[str, RecordRow] = {}
        with self._environment.reading() as transaction:
            for key, data in transaction.scan(_BLOCK + _run_key(run)):
                found |= self._rows(key, data, names)
        return found

    def runs(self) -> set[str]:
        """Return the names of all runs that have rows."""
        found = set()
        with self._environment.reading() as transaction:
            start = _BLOCK
            while entry := next(transaction.scan(_BLOCK, start=start), None):
                found.add(self._block(*entry).run)
                start = entry[0][: len(_BLOCK) + _RUN_KEY_BYTES] + b"\xff" * 5
        return found

    def copy(self, name: RecordName) -> bytes | None:
        """Return the verbatim copy of the record *name*, for ``repair`` alone."""
        return self._copies.find(f"commits/{name.run}/{name.step}.{name.id}")

    def copies_in(self, directory: Path) -> Iterator[tuple[str, bytes]]:
        """Yield the verbatim copies in *directory*, which was an index of this store, with their names in the store."""
        return Copies(directory / "copies", store_id=self._store_id).sound()

    def keep_copies(self, records: list[bytes]) -> None:
        """Keep verbatim copies without rows: of records that are there, and damaged."""
        try:
            self._copies.append(records)
        except OSError as exc:
            raise ManifestUnusable(f"the index cannot be written: {exc}") from exc

    def _rows(self, key: bytes, data: bytes, shared: dict[tuple[str, ...], tuple[str, ...]]) -> dict[str, RecordRow]:
        block = self._block(key, data)
        try:
            return dict(zip(block.names, _rows_of(block, shared), strict=True))
        except (IndexError, ValueError) as exc:
            raise ManifestUnusable(
                f"the index is damaged: the columns of a block do not fit each other: {exc}"
            ) from exc

    def _block(self, key: bytes, data: bytes) -> RowBlock:
        try:
            block = from_plain(RowBlock, unpack(self._unsealed(key, data), what="a block"), what="a block")
        except IntegrityError as exc:
            raise ManifestUnusable(f"the index is damaged: {exc}") from exc
        if not key.startswith(_BLOCK + _run_key(block.run)):
            raise ManifestUnusable("the index is damaged: a block lies under another run")
        return block

    # -- writing -------------------------------------------------------------------------------------------------

    def collected(self) -> str:
        """Return the newest collection of which all that it removed has been dropped; empty where there is none."""
        with self._environment.reading() as transaction:
            data = transaction.get(_COLLECTED_KEY)
        return "" if data is None else self._unsealed(_COLLECTED_KEY, data).decode()

    def update(
        self,
        *,
        add: Iterable[tuple[Commit, bytes]] = (),
        rows: Iterable[RecordRow] = (),
        drop: Iterable[RecordName] = (),
        collected: str | None = None,
    ) -> None:
        """
        Add records, each with its bytes, drop others, and remember the collection that asked for it, all at once.

        Of what has vanished there may be no more than its row: *rows* are added as they are.
        """
        if self.read_only:
            return
        changes: dict[str, dict[str, RecordRow | None]] = {}
        copies = {}
        for name in drop:
            changes.setdefault(name.run, {})[f"{name.step}.{name.id}"] = None
        for row in rows:
            changes.setdefault(row.run, {})[row.file_name] = row
        for commit, data in add:
            row = row_of(commit)
            changes.setdefault(row.run, {})[row.file_name] = row
            copies[row.file_name] = data

        def apply(transaction: Transaction) -> None:
            self._apply(transaction, changes, copies)
            if collected is not None:
                transaction.put(_COLLECTED_KEY, self._sealed(_COLLECTED_KEY, collected.encode()))

        self._environment.change(apply)

    def _apply(
        self, transaction: Transaction, changes: dict[str, dict[str, RecordRow | None]], copies: dict[str, bytes]
    ) -> None:
        for run, wanted in changes.items():
            blocks = {key: self._rows(key, data, {}) for key, data in transaction.scan(_BLOCK + _run_key(run))}
            new = self._change_known(transaction, blocks, wanted)
            self.keep_copies([copies[row.file_name] for row in new if row.file_name in copies])
            self._append(transaction, run, blocks, new)

    def _change_known(
        self,
        transaction: Transaction,
        blocks: dict[bytes, dict[str, RecordRow]],
        wanted: dict[str, RecordRow | None],
    ) -> list[RecordRow]:
        """Replace and drop rows where they are; return those that are nowhere yet."""
        known = set()
        for key, rows in blocks.items():
            mine = rows.keys() & wanted.keys()
            known |= mine
            if any(rows[name] != wanted[name] for name in mine):
                for name in mine:
                    row = wanted[name]
                    if row is None:
                        del rows[name]
                    else:
                        rows[name] = row
                self._put(transaction, key, list(rows.values()))
        return [row for name, row in wanted.items() if row is not None and name not in known]

    def _append(
        self, transaction: Transaction, run: str, blocks: dict[bytes, dict[str, RecordRow]], new: list[RecordRow]
    ) -> None:
        """Fill the last block and add more."""
        if not new:
            return
        last = max(blocks, default=None)
        number = 0 if last is None else int.from_bytes(last[-4:], "big")
        pending = [] if last is None else list(blocks[last].values())
        pending += new
        for start in range(0, len(pending), BLOCK_ROWS):
            key = _BLOCK + _run_key(run) + number.to_bytes(4, "big")
            self._put(transaction, key, pending[start : start + BLOCK_ROWS])
            number += 1

    def _put(self, transaction: Transaction, key: bytes, rows: list[RecordRow]) -> None:
        if rows:
            transaction.put(key, self._sealed(key, pack(to_plain(_block_of(rows)))))
        else:
            transaction.delete(key)

    # -- the rest ------------------------------------------------------------------------------------------------

    def _check_header(self) -> None:
        # The format too: after a migration every index of the old one is void, also those on nodes far away.
        expected = pack({"store": self._store_id, "schema": SCHEMA, "format": FORMAT})
        with self._environment.reading() as transaction:
            data = transaction.get(_HEADER_KEY)
            empty = data is None and next(transaction.scan(b""), None) is None
        found = None if data is None else self._unsealed(_HEADER_KEY, data)
        if found == expected:
            return
        if not empty or self._environment.read_only:
            raise ManifestUnusable(
                "the index belongs to another store, another version, or has lost its header",
                is_of_another_format=found is not None and _format_in(found) != FORMAT,
            )
        self._environment.change(lambda transaction: transaction.put(_HEADER_KEY, self._sealed(_HEADER_KEY, expected)))

    def _sealed(self, key: bytes, payload: bytes) -> bytes:
        return seal(Envelope(store_id=self._store_id, name=f"index/{key.hex()}", payload=payload))

    def _unsealed(self, key: bytes, data: bytes) -> bytes:
        try:
            return unseal(data, name=f"index/{key.hex()}", store_id=self._store_id).payload
        except LayerstoreError as exc:
            raise ManifestUnusable(f"the index is damaged: {exc}") from exc


def _run_key(run: str) -> bytes:
    return digest(run.encode())


def _block_of(rows: Sequence[RecordRow]) -> RowBlock:
    """Return *rows*, of one run, by columns."""
    kinds = {(row.attempt, row.lineage, row.layer_names): None for row in rows}
    place = {kind: number for number, kind in enumerate(kinds)}
    return RowBlock(
        run=rows[0].run,
        names=tuple(row.file_name for row in rows),
        kinds=tuple(RowKind(attempt=attempt, lineage=lineage, layers=layers) for attempt, lineage, layers in kinds),
        kind=tuple(place[row.attempt, row.lineage, row.layer_names] for row in rows),
        save_numbers=tuple(row.save_number for row in rows),
        hiding=tuple(Hiding(row=place, commits=row.supersedes) for place, row in enumerate(rows) if row.supersedes),
        flags=tuple(row.flags for row in rows),
    )


def _rows_of(block: RowBlock, shared: dict[tuple[str, ...], tuple[str, ...]]) -> list[RecordRow]:
    """Return the rows of *block*; tuples of layer names that are in *shared* are taken from there."""
    kinds = [block.kinds[kind] for kind in block.kind]
    layers = [shared.setdefault(kind.layers, kind.layers) for kind in block.kinds]
    hiding = {hides.row: hides.commits for hides in block.hiding}
    columns = (
        repeat(block.run),
        [int(name[:_STEP_ENDS]) for name in block.names],
        [name[_ID_BEGINS:] for name in block.names],
        [kind.attempt for kind in kinds],
        [kind.lineage for kind in kinds],
        block.save_numbers,
        [hiding.get(place, ()) for place in range(len(kinds))] if hiding else repeat(()),
        [layers[kind] for kind in block.kind],
        block.flags,
    )
    # What RecordRow(…) does, ten thousand times without a call of Python's.
    return list(map(partial(tuple.__new__, RecordRow), zip(*columns)))  # noqa: B905  # two of them have no end


def _format_in(header: bytes) -> object:
    stated = unpack(header, what="the index's header")
    return stated.get("format") if isinstance(stated, dict) else None
