"""
Records and index together: every question about which commits there are.

The folder listing decides what exists, the record decides what it says, the index only saves reading them all.
Whatever is wrong with the index, the answers are the same.
"""

import contextlib
import itertools
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from layerstore.errors import PROCESS_ERRNOS, IntegrityError, LayerstoreError, NotFound, StorageIO
from layerstore.layers import typed
from layerstore.model import Commit, LayerEntry
from layerstore.nearest import did_you_mean, nearest
from layerstore.storage.commits import RecordName, RecordStore, name_in
from layerstore.storage.environment import ManifestUnusable
from layerstore.storage.files import Stamp
from layerstore.storage.manifest import Manifest, RecordRow, row_of
from layerstore.storage.runview import RunView

Answer = TypeVar("Answer")


class IndexNotice(UserWarning):
    """The index was rebuilt, or cannot be used here; no record is lost by it."""


# What the folder of an index that was dropped is called after, until all is taken over from it.
_DROPPED = ".dropped-"

# A copy of a record beside the index, and what it says.
_Copy = tuple[RecordName, Commit, bytes]

# Records that are decoded before the index is told of them: some of them are held in memory at once.
_BATCH = 256


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a run, and of which state of its folder."""

    rows: dict[str, RecordRow]
    """Of every record there, by its file's name."""
    strangers: frozenset[str]
    """What else is in the folder."""
    view: RunView
    stamp: Stamp | None
    """None where the folder was not there: remembered records have vanished with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reindexed:
    """What an index that was made afresh covers."""

    commits: int
    vanished: tuple[RecordName, ...]
    """Records that have vanished, and that it goes on remembering."""
    forgotten: tuple[RecordName, ...]
    """Records that have vanished, and that nobody remembers any more."""


class Catalog:
    """Answers about runs and commits."""

    def __init__(self, records: RecordStore, *, directory: Path, store_id: str) -> None:
        self._records = records
        self._directory = directory
        self._store_id = store_id
        self._manifest: Manifest | None = None
        self._known: dict[str, _Known] = {}
        self._guard = threading.RLock()  # one thread at a time opens, asks or replaces the index
        self.index_problem: str | None = None
        """Why there is no index, if there is none."""
        self._refusal: ManifestUnusable | None = None
        self._remembers: Callable[[RecordName], bool] | None = None
        """During a rebuild: whether what has vanished is to be taken over from the old index."""

    def close(self) -> None:
        """Release the index."""
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            manifest.close()

    # -- questions -----------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Return the runs that have records, or that the index remembers to have had some, by name."""
        there = {run for run in self._records.runs() if self._has_records(run)}
        return sorted(there)

    def _has_records(self, run: str) -> bool:
        known = self._known.get(run)
        if known is not None and known.rows and self._is_as_it_was(known, run):
            return True
        return any(name_in(run, name) for name in self._records.listing(run))

    def view(self, run: str) -> RunView:
        """
        Return what *run* holds now.

        Raises:
            NotFound: It has no record.
        """
        found = self.find(run)
        if found is None:
            raise NotFound(f"there is no run {run!r} in this store", hint=self._known_runs(run))
        return found

    def find(self, run: str) -> RunView | None:
        """
        Return what *run* holds now; None where it has no record, or none any more.

        The folder is listed again only if it may have changed, and records are read only where they are new.
        """
        with self._guard:
            if self._manifest is not None:
                self._manifest.check_process()
            known = self._known.get(run)
            if known is not None and not self._is_as_it_was(known, run):
                known = self._looked_again(known, run)
            if known is None:
                known = self._found_out(run)
                # What is damaged may be repaired in place, which its folder does not show.
                if known is None or known.view.damaged:
                    self._known.pop(run, None)
                else:
                    self._known[run] = known
            return None if known is None else known.view

    def _is_as_it_was(self, known: _Known, run: str) -> bool:
        """Whether the folder of *run* cannot have changed since it was listed."""
        return (
            known.stamp is not None
            and known.stamp.is_settled
            and not self._is_on_network
            and known.stamp == self._records.stamp(run)
        )

    @cached_property
    def _is_on_network(self) -> bool:
        """Whether folders may have times from another machine's clock, or from a cache: those prove nothing."""
        return self._records.is_on_network()

    def _looked_again(self, known: _Known, run: str) -> _Known | None:
        """Return *known* with a new stamp if the folder of *run* has the same records, else None."""
        stamp = self._records.stamp(run)
        names = frozenset(self._records.listing(run))
        if names - known.strangers != known.rows.keys():
            return None
        found = replace(known, stamp=stamp)
        self._known[run] = found
        return found

    def _found_out(self, run: str) -> _Known | None:
        # The index first: a commit that is published in between is then merely not indexed yet.
        indexed = self.indexed(run)
        stamp = self._records.stamp(run)
        names = set(self._records.listing(run))
        vanished = indexed.keys() - names
        rows = {name: row for name, row in indexed.items() if name not in vanished} if vanished else indexed
        if vanished:
            self._with_index(lambda manifest: manifest.update(drop=[indexed[name].name for name in vanished]))
        damaged: dict[RecordName, LayerstoreError] = {}
        found = {name: name_in(run, name) for name in names - indexed.keys()}
        strangers = frozenset(name for name, record in found.items() if record is None)
        unseen = sorted(record for record in found.values() if record is not None)
        if not (rows or unseen):
            return None
        for start in range(0, len(unseen), _BATCH):
            rows |= self._read_unseen(unseen[start : start + _BATCH], damaged)
        view = RunView(run=run, rows={row.id: row for row in rows.values()}, damaged=damaged)
        return _Known(rows=rows, strangers=strangers, view=view, stamp=stamp)

    def _read_unseen(self, names: list[RecordName], damaged: dict[RecordName, LayerstoreError]) -> dict[str, RecordRow]:
        """Read the records *names*, tell the index of them, and return their rows; note in *damaged* what fails."""
        found: list[tuple[Commit, bytes]] = []
        for name in names:
            try:
                data = self._records.read_bytes(name)
                found.append((self._records.decode(data, name), data))
            except LayerstoreError as exc:
                damaged[name] = exc
        self._catch_up(found)
        rows = (row_of(commit) for commit, _ in found)
        return {row.file_name: row for row in rows}

    def commit(self, name: RecordName) -> Commit:
        """
        Read and check the record *name*.

        Raises:
            IntegrityError: It is damaged or lost.
            NotFound: A collection has removed it since it was found.
        """
        with self._collected_told(name):
            return self._records.read(name)

    def entries(self, name: RecordName, layers: Collection[str]) -> dict[str, LayerEntry]:
        """As ``commit``, but return only what it says of those of *layers* that it has, and build no more."""
        with self._collected_told(name):
            return self._records.read_entries(name, layers)

    @contextlib.contextmanager
    def _collected_told(self, name: RecordName) -> Iterator[None]:
        """Tell what a collection has removed meanwhile from what is damaged or lost."""
        try:
            yield
        except IntegrityError as exc:
            if self._records.is_there(name):
                raise  # to look at the whole run for each that is damaged would take hours
            view = self.find(name.run)
            if view is not None and (name.id in view.rows or name in view.damaged):
                raise
            raise NotFound(
                f"{name.run}@{name.step} (commit {name.id[:12]}) was removed by a collection meanwhile",
                hint=f"layerstore log {typed(name.run)} lists what is left",
            ) from exc

    def _known_runs(self, run: str) -> str:
        runs = self.runs()
        if not runs:
            return "the store is empty: layerstore ingest CHECKPOINT"
        # Runs and pins share one namespace: who has mistyped a pin is asked for a run.
        meant = nearest(run, [*runs, *self._records.pin_names()])
        more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
        return did_you_mean(meant, else_=f"runs here: {', '.join(runs[:10])}{more}")

    # -- the index -----------------------------------------------------------------------------------------------

    def copy(self, name: RecordName) -> bytes | None:
        """Return the bytes of the record *name* as they are kept beside the index, for ``repair`` alone."""
        return self._with_index(lambda manifest: manifest.copy(name))

    def add(self, commit: Commit) -> None:
        """Tell the index of a new commit. If it cannot be told, the next open catches up."""
        try:
            data = self._records.read_bytes(self._records.name_of(commit))
        except IntegrityError:
            return  # a collection has just removed it: what is not there needs no row
        self._catch_up([(commit, data)])

    def rebuild(self) -> int:
        """
        Make the index afresh from all records; what has vanished it goes on remembering, unless it is to *forget*.

        Raises:
            StorageIO: There can be none here; questions are answered without.
        """
        with self._guard:
            self.close()
            self._drop()
            self._known.clear()
            self.index_problem = None
            count = sum(len(self.view(run).rows) for run in self._records.runs() if self._has_records(run))
        if self._refusal is not None and self.index_problem is not None:
            raise _not_made(self._refusal, self._directory)
        return count

    def indexed(self, run: str) -> dict[str, RecordRow]:
        """Return what the index says of *run*, right or not, by the names of the records' files."""
        found = self._with_index(lambda manifest: manifest.rows(run))
        if found is not None:
            return found
        # Without an index nothing is remembered, but what this process has read it need not read again.
        known = self._known.get(run)
        return {} if known is None else {name: known.rows[name] for name in self._present(known, run)}

    def _present(self, known: _Known, run: str) -> set[str]:
        return known.rows.keys() & set(self._records.listing(run))

    def _catch_up(self, unseen: list[tuple[Commit, bytes]]) -> None:
        if not unseen:
            return
        self._with_index(lambda manifest: manifest.update(add=unseen))
        # What a collection has removed since it was read must not be remembered: no later one would excuse that.
        gone = {name for commit, _ in unseen if not self._records.is_there(name := self._records.name_of(commit))}
        if gone:
            self._with_index(lambda manifest: manifest.update(drop=gone))

    def _with_index(self, ask: Callable[[Manifest], Answer]) -> Answer | None:
        """Ask the index; replace it if it is damaged; answer None where there can be no index."""
        with self._guard:
            for is_last_try in (False, True):
                if self.index_problem is not None:
                    return None
                try:
                    return ask(self._opened())
                except ManifestUnusable as exc:
                    self.close()
                    self._give_up_or_drop(exc, is_last_try=is_last_try)
        return None

    def _opened(self) -> Manifest:
        if self._manifest is None:
            self._manifest = Manifest(self._directory, store_id=self._store_id)
        return self._manifest

    def _give_up_or_drop(self, problem: ManifestUnusable, *, is_last_try: bool) -> None:
        """Drop a damaged index, so that the next look makes a new one; go on without if that is not possible."""
        # A process without memory or descriptors says nothing of the index. What one of another format remembers bears
        # other names by now: nothing of it is taken over.
        if (
            is_last_try
            or _errno_of(problem) in PROCESS_ERRNOS
            or not self._drop(wholly=bool(problem.facts.get("is_of_another_format")))
        ):
            self.index_problem, self._refusal = str(problem), problem
        outcome = "going on without it, slower" if self.index_problem else "rebuilding it from the commit records"
        warnings.warn(f"{problem}; {outcome}; no record is lost by it", IndexNotice, stacklevel=2)

    def _drop(self, *, wholly: bool = False) -> bool:
        """
        Put the index aside, if there is one and it can be; who has it open keeps it, and the next one reads it.

        If *wholly*, nothing of it is left to be read.
        """
        aside = self._directory.with_name(f"{self._directory.name}{_DROPPED}{secrets.token_hex(4)}")
        try:
            self._directory.rename(aside)
        except OSError:
            return False  # nothing there, or a read-only store: its index stays as it is, unused
        if wholly:
            shutil.rmtree(aside, ignore_errors=True)
        return True


def _batches(records: Iterator[_Copy]) -> Iterator[list[_Copy]]:
    while batch := list(itertools.islice(records, _BATCH)):
        yield batch


def _errno_of(problem: ManifestUnusable) -> int | None:
    """Return the system's own number for *problem*, None where it was none of the system's."""
    cause = problem.__cause__
    while cause is not None:
        # LMDB's errors have the second.
        number: int | None = getattr(cause, "errno", None) or getattr(cause, "code", None)
        if number is not None:
            return number
        cause = cause.__cause__
    return None


def _not_made(problem: ManifestUnusable, directory: Path) -> StorageIO:
    return StorageIO(
        f"{problem}; no record is lost, and questions are answered without an index",
        errno=_errno_of(problem),
        filename=str(directory),
        hint="make it possible there, or name another folder by LAYERSTORE_MANIFEST_DIR, and repeat the command",
    )


def _vanished(name: RecordName) -> IntegrityError:
    return IntegrityError(
        f"the record of {name.run}@{name.step} (commit {name.id[:12]}) has vanished from commits/{name.run}",
        hint="layerstore repair writes it back if it can; layerstore reindex --forget forgets it",
    )
