"""
Records and index together: every question about which commits there are.

The folder listing decides what exists, the record decides what it says, the index only saves reading them all.
Whatever is wrong with the index, the answers are the same.
"""

import dataclasses
import itertools
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.model import Commit, LayerEntry
from layerstore.storage.commits import RecordName, RecordStore, name_in
from layerstore.storage.environment import ManifestUnusable
from layerstore.storage.files import Stamp
from layerstore.storage.garbage import Garbage, names_in
from layerstore.storage.manifest import Manifest, RecordRow, row_of
from layerstore.storage.runview import RunView

Answer = TypeVar("Answer")


class IndexNotice(UserWarning):
    """The index was rebuilt, or cannot be used here; nothing is lost and answers are unchanged."""


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


class Catalog:
    """Answers about runs and commits."""

    def __init__(self, records: RecordStore, garbage: Garbage, *, directory: Path, store_id: str) -> None:
        self._records = records
        self._garbage = garbage
        self._directory = directory
        self._store_id = store_id
        self._manifest: Manifest | None = None
        self._known: dict[str, _Known] = {}
        self._guard = threading.RLock()  # one thread at a time opens, asks or replaces the index
        self.index_problem: str | None = None
        """Why there is no index, if there is none."""

    def close(self) -> None:
        """Release the index."""
        manifest, self._manifest = self._manifest, None
        if manifest is not None:
            manifest.close()

    # -- questions -----------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Return the runs that have records, or that the index remembers to have had some, by name."""
        there = {run for run in self._records.runs() if self._has_records(run)}
        return sorted(there | self.remembered_runs())

    def _has_records(self, run: str) -> bool:
        known = self._known.get(run)
        if known is not None and known.rows and self._is_as_it_was(known, run):
            return True
        return any(name_in(run, name) for name in self._records.listing(run))

    def view(self, run: str) -> RunView:
        """
        Return what *run* holds now.

        The folder is listed again only if it may have changed, and records are read only where they are new.

        Raises:
            NotFound: It has no record.
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
                if known.view.damaged:
                    self._known.pop(run, None)
                else:
                    self._known[run] = known
            return known.view

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
        found = dataclasses.replace(known, stamp=stamp)
        self._known[run] = found
        return found

    def _found_out(self, run: str) -> _Known:
        # The index first: a commit that is published in between is then merely not indexed yet.
        indexed = self._indexed(run)
        stamp = self._records.stamp(run)
        names = set(self._records.listing(run))
        vanished = indexed.keys() - names
        rows = {name: row for name, row in indexed.items() if name not in vanished} if vanished else indexed
        # Remembered, not forgotten: what a lost record had hidden must not come back in silence.
        gone = self._not_collected(indexed[name].name for name in vanished)
        damaged: dict[RecordName, LayerstoreError] = {name: _vanished(name) for name in gone}
        found = {name: name_in(run, name) for name in names - indexed.keys()}
        strangers = frozenset(name for name, record in found.items() if record is None)
        unseen = sorted(record for record in found.values() if record is not None)
        if not (rows or unseen or gone):
            raise NotFound(f"there is no run {run!r} in this store", hint=self._known_runs())
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
        """Read and check the record *name*."""
        return self._records.read(name)

    def entries(self, name: RecordName, layers: Collection[str]) -> dict[str, LayerEntry]:
        """Read and check the record *name*; return what it says of those of *layers* that it has, and build no more."""
        return self._records.read_entries(name, layers)

    def _known_runs(self) -> str:
        runs = self.runs()
        return f"runs here: {', '.join(runs[:10])}" if runs else "the store is empty: layerstore ingest CHECKPOINT"

    def remembered_runs(self) -> set[str]:
        """Return the runs that the index knows, whether or not anything is left of them."""
        return self._with_index(lambda manifest: manifest.runs()) or set()

    def vanished(self, run: str) -> list[RecordName]:
        """Return the records of *run* that the index remembers and that are not there any more."""
        indexed = self._indexed(run)
        names = indexed.keys() - set(self._records.listing(run))
        return self._not_collected(indexed[name].name for name in names)

    def last_collection(self) -> str:
        """Return the newest collection that the index has taken up wholly; empty where there is none."""
        return self._with_index(lambda manifest: manifest.collected()) or ""

    def _not_collected(self, vanished: Iterable[RecordName]) -> list[RecordName]:
        """
        Return those of *vanished* that no collection has removed; the index forgets the others.

        A collection is believed once: what is saved again after it, and then lost, is not excused by it.
        """
        vanished = sorted(vanished)
        if not vanished:
            return []
        plans = self._garbage.plans_after(self.last_collection())
        collected = {name for plan in plans for name in names_in(plan)}
        if collected.isdisjoint(vanished):
            return vanished
        there = {name for run in {name.run for name in collected} for name in self._records.names(run)}
        done = [plan.id for plan in itertools.takewhile(lambda each: there.isdisjoint(names_in(each)), plans)]
        newest = done[-1] if done else None
        self._with_index(lambda manifest: manifest.update(drop=collected - there, collected=newest))
        return [name for name in vanished if name not in collected]

    def differences(self, run: str) -> list[str]:
        """Return what the index says of *run* otherwise than its records do; there should be nothing."""
        found = []
        for row in self._indexed(run).values():
            try:
                commit = self._records.read(row.name)
            except LayerstoreError:
                continue  # a damaged record is reported for itself
            if row_of(commit) != row:
                found.append(f"the index tells {run}@{row.step} differently than its record does")
        return found

    # -- the index -----------------------------------------------------------------------------------------------

    def add(self, commit: Commit) -> None:
        """Tell the index of a new commit. If it cannot be told, the next open catches up."""
        data = self._records.read_bytes(self._records.name_of(commit))
        self._catch_up([(commit, data)])

    def rebuild(self) -> int:
        """Make the index afresh from all records; return how many it covers."""
        for name in (name for run in self.runs() for name in self.vanished(run)):
            warnings.warn(f"forgot {_vanished(name)}", IndexNotice, stacklevel=2)
        self.close()
        self._drop()
        self._known.clear()
        self.index_problem = None
        self._opened()
        return sum(len(self.view(run).rows) for run in self.runs())

    def _indexed(self, run: str) -> dict[str, RecordRow]:
        found = self._with_index(lambda manifest: manifest.rows(run))
        if found is not None:
            return found
        # Without an index nothing is remembered, but what this process has read it need not read again.
        known = self._known.get(run)
        return {} if known is None else {name: known.rows[name] for name in self._present(known, run)}

    def _present(self, known: _Known, run: str) -> set[str]:
        return known.rows.keys() & set(self._records.listing(run))

    def _catch_up(self, unseen: list[tuple[Commit, bytes]]) -> None:
        if unseen:
            self._with_index(lambda manifest: manifest.update(add=unseen))

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
        if is_last_try or not self._drop():
            self.index_problem = str(problem)
        outcome = "going on without it, slower" if self.index_problem else "rebuilding it from the commit records"
        warnings.warn(f"{problem}; {outcome}; nothing is lost", IndexNotice, stacklevel=2)

    def _drop(self) -> bool:
        """Remove the index, if there is one and it can be; renamed first, so that who has it open keeps a whole one."""
        aside = self._directory.with_name(f"{self._directory.name}.dropped-{secrets.token_hex(4)}")
        try:
            self._directory.rename(aside)
        except OSError:
            return False  # nothing there, or a read-only store: its index stays as it is, unused
        # What resists stays behind under a name that nothing reads.
        shutil.rmtree(aside, ignore_errors=True)
        return True


def _vanished(name: RecordName) -> IntegrityError:
    return IntegrityError(
        f"the record of {name.run}@{name.step} (commit {name.id[:12]}) has vanished from commits/{name.run}",
        hint="put it back from a copy of the store, or let layerstore reindex forget it",
    )
