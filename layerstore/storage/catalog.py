"""
The catalog answers every query about which commits exist, from the folders' listings and the records.

The index (``index.py``) only saves reading all records: the catalog keeps it in step with the listings, drops it when
it is damaged, and gives the same answers without it.
"""

import contextlib
import heapq
import secrets
import shutil
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from layerstore.errors import PROCESS_ERRNOS, IntegrityError, LayerstoreError, NotFound, StorageIO
from layerstore.layers import typed
from layerstore.model import Commit, CommitId, Fork, LayerEntry
from layerstore.nearest import did_you_mean, nearest
from layerstore.storage.commits import RecordName, RecordStore, name_in
from layerstore.storage.index import Index, IndexUnusable, RecordRow, row_of
from layerstore.units import short_id

Answer = TypeVar("Answer")

# How many records are read before they are indexed: an interrupted first scan keeps the batches that it finished.
_BATCH = 256

# How many vanished commits a warning lists; the others are only counted.
_NAMED_MAX = 10


_BY_ATTEMPT = attrgetter("attempt")
_BY_STEP = attrgetter("step")
_PLACE = attrgetter("attempt", "step")
_IN_ORDER = attrgetter("attempt", "step", "id")
_IN_HISTORY = attrgetter("step", "attempt", "id")


class IndexNotice(UserWarning):
    """The index was rebuilt, cannot be used on this node, or had rows of commits that are gone."""


# Without slots: a cached property needs a __dict__.
@dataclass(frozen=True, kw_only=True)
class RunView:
    """The records of one run, as they are now."""

    run: str
    rows: dict[CommitId, RecordRow]
    """Every readable record."""
    damaged: dict[RecordName, LayerstoreError]
    """Records that exist but cannot be read."""

    @cached_property
    def hidden(self) -> set[CommitId]:
        """Commits that other commits supersede."""
        return {hidden for row in self.rows.values() for hidden in row.supersedes}

    @cached_property
    def visible(self) -> list[RecordRow]:
        """The commits that a user sees, by attempt and step."""
        hidden = self.hidden
        return [row for row in self._ordered if row.id not in hidden]

    @property
    def newest(self) -> RecordRow | None:
        """The last visible commit, in the order of attempts and steps."""
        return self.visible[-1] if self.visible else None

    def newer_than(self, row: RecordRow | None) -> list[RecordRow]:
        """Return the visible commits after *row*, which may come from another store; all if *row* is None."""
        return self.visible[0 if row is None else bisect_right(self.visible, _PLACE(row), key=_PLACE) :]

    @cached_property
    def attempts(self) -> list[int]:
        """The attempts that have visible commits, oldest first."""
        return list(self._by_attempt)

    @cached_property
    def newest_number(self) -> int:
        """The highest attempt number, whether or not the attempt has visible commits."""
        return max((row.attempt for row in self.rows.values()), default=0)

    @property
    def newest_attempt(self) -> int:
        """The newest attempt that has visible commits; if there is none, the newest of all attempts."""
        return self.attempts[-1] if self.attempts else self.newest_number

    def of_attempt(self, attempt: int) -> list[RecordRow]:
        """Return the visible commits of *attempt* itself, by step."""
        return self._by_attempt.get(attempt, [])

    def fork_of(self, attempt: int) -> Fork | None:
        """
        Return where *attempt* forked from an earlier one; None if it did not.

        Records of later attempts repeat the fork, so it is known even if *attempt* has no records left. Attempts are
        numbered in order, so a record that claims to fork from a later attempt is ignored.
        """
        fork = self._forks.get(attempt)
        return fork if fork is not None and fork.attempt < attempt else None

    def lineage_of(self, attempt: int) -> tuple[Fork, ...]:
        """Return where *attempt* forked, where its parent forked, and so on."""
        forks = []
        fork = self.fork_of(attempt)
        while fork is not None:
            forks.append(fork)
            fork = self.fork_of(fork.attempt)
        return tuple(forks)

    def history(self, attempt: int, *, step: int | None = None) -> Iterator[RecordRow]:
        """
        Yield the visible commits of *attempt*, newest first, then its ancestors' commits up to each fork.

        With *step*, the history begins at that step or below. If a step has two commits, both are yielded. The iterator
        is lazy, so a caller may stop at any point.
        """
        # Indexed backwards, without reversed copies of the lists: most callers take only one of 10,000 commits.
        segments = [map(rows.__getitem__, range(end - 1, -1, -1)) for rows, end in self._segments(attempt, step)]
        # Merged, not chained: usually one segment ends before the next begins, but an attempt may save below its own
        # fork.
        return heapq.merge(*segments, key=_IN_HISTORY, reverse=True)

    def number_at(self, attempt: int, step: int, *, default: RecordRow) -> int:
        """
        Return the save number at *step* in *attempt*'s history: the oldest save's number, plus one for each later save.

        If there is no visible save up to *step*, return the number of *default*.
        """
        segments = self._segments(attempt, step)
        if not segments:
            return default.save_number
        oldest = min((rows[0] for rows, _ in segments), key=_IN_HISTORY)
        return oldest.save_number + sum(end for _, end in segments) - 1

    def _segments(self, attempt: int, step: int | None) -> list[tuple[list[RecordRow], int]]:
        """
        Return the visible commits of *attempt* and of each of its ancestors.

        Each list comes with a number: how many of its commits come neither after *step* nor after the fork.
        """
        segments = []
        below: int | None = step
        at: int | None = attempt
        while at is not None:
            rows = self.of_attempt(at)
            end = len(rows) if below is None else bisect_right(rows, below, key=_BY_STEP)
            if end:
                segments.append((rows, end))
            fork = self.fork_of(at)
            if fork is not None:
                below = fork.step if below is None else min(below, fork.step)
            at = None if fork is None else fork.attempt
        return segments

    @cached_property
    def _ordered(self) -> list[RecordRow]:
        return sorted(self.rows.values(), key=_IN_ORDER)

    @cached_property
    def _by_attempt(self) -> dict[int, list[RecordRow]]:
        return {attempt: list(rows) for attempt, rows in groupby(self.visible, key=_BY_ATTEMPT)}

    @cached_property
    def _forks(self) -> dict[int, Fork | None]:
        forks: dict[int, Fork | None] = {}
        # The first record of an attempt counts; the others repeat its lineage.
        for row in self._ordered:
            attempt = row.attempt
            for fork in row.lineage:
                forks.setdefault(attempt, fork)
                attempt = fork.attempt
            forks.setdefault(attempt, None)
        return forks


@dataclass(frozen=True, slots=True)
class _Known:
    """A run as it was last read, with a fingerprint of its folder at that time."""

    rows: dict[str, RecordRow]
    """The row of every readable record, by file name."""
    strangers: frozenset[str]
    """Other files in the folder."""
    view: RunView
    stamp: tuple[int, ...] | None
    """The fingerprint; None if it cannot prove that the folder is unchanged."""


class Catalog:
    """Answers about runs and commits."""

    def __init__(self, records: RecordStore, *, directory: Path, store_id: str, is_mirror: bool = False) -> None:
        """Make the catalog of a store; for a mirror, do not warn of vanished records: each refresh may remove some."""
        self._records = records
        self._is_mirror = is_mirror
        self._directory = directory
        self._store_id = store_id
        self._index: Index | None = None
        self._known: dict[str, _Known] = {}
        self._guard = threading.RLock()  # one thread at a time opens, queries or replaces the index
        self.index_problem: str | None = None
        """Why the index is not used; None if it is."""
        self._refusal: IndexUnusable | None = None

    def close(self) -> None:
        """Release the index; the next query opens it again."""
        index, self._index = self._index, None
        if index is not None:
            index.close()

    # -- queries -------------------------------------------------------------------------------------------------

    def runs(self) -> list[str]:
        """Return the runs that have records, by name."""
        listed = {run: self._records.listing(run) for run in self._records.runs()}
        there = [run for run, names in listed.items() if any(name_in(run, name) for name in names)]
        for run in (self._with_index(lambda index: index.runs()) or set()).difference(there):
            self.find(run)  # reports commits that are gone
        return there

    def view(self, run: str) -> RunView:
        """
        Return the present view of *run*.

        Raises:
            NotFound: *run* has no records.
        """
        view = self.find(run)
        if view is None and run in self._records.pin_names():
            raise NotFound(f"{run!r} is a pin, not a run", hint=f"layerstore show {typed(run)} shows what it refers to")
        if view is None:
            raise NotFound(f"there is no run {run!r} in this store", hint=self._known_runs(run), name=run)
        return view

    def find(self, run: str) -> RunView | None:
        """
        Return the present view of *run*; None if *run* has no records.

        Lists the folder again only if it may have changed, and reads only new records.
        """
        with self._guard:
            if self._index is not None:
                self._index.check_process()
            known = self._known.get(run)
            # The folder's stamp does not change when a damaged record is repaired in place.
            if known is None or known.view.damaged or not self._is_as_it_was(known, run):
                known = self._known[run] = self._compared(run, known)
            return known.view if known.rows or known.view.damaged else None

    def _is_as_it_was(self, known: _Known, run: str) -> bool:
        """Whether the folder of *run* cannot have changed since it was listed."""
        return known.stamp is not None and known.stamp == self._records.stamp(run)

    def _compared(self, run: str, before: _Known | None) -> _Known:
        """Return *run* as it is now: the known rows, without those of removed records, and rows of the new records."""
        # Read the index before listing: a commit published in between then merely looks unindexed.
        rows = self.indexed(run) if before is None else before.rows
        # Take the stamp before listing: if the folder changes in between, the stamp differs and the folder is relisted.
        stamp = self._records.stamp(run)
        names = set(self._records.listing(run))
        if before is not None:
            if not before.view.damaged and names - before.strangers == rows.keys():
                return replace(before, stamp=stamp)
            # This process or another may have indexed the new records already.
            new = (name_in(run, name) for name in names - rows.keys())
            rows = self.indexed(run, [name for name in new if name is not None]) | rows
        self._drop_rows(rows[name].name for name in rows.keys() - names)
        rows = {name: row for name, row in rows.items() if name in names}
        records = {name: name_in(run, name) for name in names - rows.keys()}
        unseen = sorted(name for name in records.values() if name is not None)
        damaged: dict[RecordName, LayerstoreError] = {}
        for start in range(0, len(unseen), _BATCH):
            read = []
            for name, commit in self._records.each(unseen[start : start + _BATCH]):
                if isinstance(commit, Commit):
                    read.append(row_of(commit))
                else:
                    damaged[name] = commit
            self._add_rows(read)
            rows |= {row.file_name: row for row in read}
        return _Known(
            rows=rows,
            strangers=frozenset(name for name, record in records.items() if record is None),
            view=RunView(run=run, rows={row.id: row for row in rows.values()}, damaged=damaged),
            stamp=stamp,
        )

    def _drop_rows(self, names: Iterable[RecordName]) -> None:
        """Drop the rows of the records *names*, which are gone; warn about the records that still had a row."""
        gone = sorted(names)
        dropped = self._with_index(lambda index: index.drop(gone)) if gone else None
        if dropped and not self._is_mirror:
            named = ", ".join(f"{name.run}@{name.step} ({short_id(name.id)})" for name in dropped[:_NAMED_MAX])
            more = f" and {len(dropped) - _NAMED_MAX} more" if len(dropped) > _NAMED_MAX else ""
            are = "the commit {} is" if len(dropped) == 1 else "the commits {} are"
            warnings.warn(
                f"{are.format(named + more)} no longer there (a collection elsewhere, or somebody's rm)",
                IndexNotice,
                stacklevel=2,
            )

    def commit(self, name: RecordName) -> Commit:
        """
        Read and check the record *name*.

        Raises:
            IntegrityError: The record is damaged.
            NotFound: The record was removed after it was found, for example by a collection.
        """
        with self._reporting_removal(name):
            return self._records.read(name)

    def check(self, name: RecordName, entries: Collection[LayerEntry]) -> None:
        """
        Read and check the record *name*, and make sure that its layers have *entries*.

        Raises:
            IntegrityError: The record is damaged, or has different entries.
            NotFound: The record was removed after it was found, for example by a collection.
        """
        actual = {entry.layer: entry for entry in self.commit(name).record.layers}
        if any(actual.get(entry.layer) != entry for entry in entries):
            raise IntegrityError(
                f"the record of {name.run}@{name.step} (commit {short_id(name.id)}) "
                "does not match what was read of it before",
                hint="layerstore reindex rebuilds the index",
            )

    @contextlib.contextmanager
    def _reporting_removal(self, name: RecordName) -> Iterator[None]:
        """Turn an IntegrityError into NotFound if the record was removed in the meantime."""
        try:
            yield
        except IntegrityError as exc:
            if self._records.is_listed(name):
                raise
            raise NotFound(
                f"{name.run}@{name.step} (commit {short_id(name.id)}) was removed by a collection meanwhile",
                hint=f"layerstore log {typed(name.run)} lists what is left",
            ) from exc

    def _known_runs(self, run: str) -> str:
        if self._records.in_trash(run):
            return hint_at_dropped(run)
        runs = self.runs()
        if not runs:
            return "the store holds no commit: layerstore ingest CHECKPOINT; layerstore log --dropped lists the trash"
        if run.partition("@")[0] in runs:
            return f"layerstore show {typed(run)} shows one commit; the run is {run.partition('@')[0]}"
        if run.isdecimal():
            return f"a step needs its run: {typed(f'{runs[0]}@{run}')}"
        # Runs and pins share one namespace: a mistyped pin ends up here.
        meant = nearest(run, [*runs, *self._records.pin_names()])
        more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
        return did_you_mean(meant, else_=f"runs here: {', '.join(runs[:10])}{more}")

    # -- the index -----------------------------------------------------------------------------------------------

    def add(self, commit: Commit) -> None:
        """Add a new commit to the index; if that fails, the next query catches up."""
        self._add_rows([row_of(commit)])

    def _add_rows(self, rows: list[RecordRow]) -> None:
        self._with_index(lambda index: index.add(rows))
        # A collection may have removed a record in the meantime, before the record had a row to drop.
        self.forget(row.name for row in rows if not self._records.is_there(row.name))

    def forget(self, names: Iterable[RecordName]) -> None:
        """Drop the rows of records that the caller has removed or moved away."""
        gone = list(names)
        if gone:
            self._with_index(lambda index: index.drop(gone))

    def indexed(self, run: str, names: Collection[RecordName] | None = None) -> dict[str, RecordRow]:
        """Return the rows of *run* or of its records *names*, by file name; they are not compared with the records."""
        return self._with_index(lambda index: index.rows(run, names)) or {}

    def rebuild(self) -> int:
        """
        Rebuild the index from all records; return the number of records.

        Raises:
            StorageIO: No index can be made; queries work without an index.
        """
        with self._guard:
            self.close()
            self._drop()
            self._known.clear()
            self.index_problem = None
            self._with_index(lambda index: index.add([]))  # an empty store gets an index too
            count = sum(len(self.view(run).rows) for run in self.runs())
        if self._refusal is not None and self.index_problem is not None:
            raise _not_made(self._refusal, self._directory)
        return count

    def _with_index(self, ask: Callable[[Index], Answer]) -> Answer | None:
        """Query the index, replacing it if it is damaged; return None if no index can be used."""
        with self._guard:
            for is_last_try in (False, True):
                if self.index_problem is not None:
                    return None
                try:
                    if self._index is None:
                        self._index = Index(self._directory, store_id=self._store_id)
                    return ask(self._index)
                except IndexUnusable as exc:
                    self.close()
                    self._give_up_or_drop(exc, is_last_try=is_last_try)
        return None

    def _give_up_or_drop(self, problem: IndexUnusable, *, is_last_try: bool) -> None:
        """Drop a damaged index, so that the next try makes a new one; if that is impossible, work without an index."""
        if not is_last_try and not self._directory.exists():
            return  # another process dropped the index while we opened it
        # Running out of memory or descriptors proves nothing about the index.
        if is_last_try or _errno_of(problem) in PROCESS_ERRNOS or not self._drop():
            self.index_problem, self._refusal = str(problem), problem
        outcome = "continuing without it, slower" if self.index_problem else "rebuilding it from the commit records"
        warnings.warn(f"{problem}; {outcome}; no record is lost by it", IndexNotice, stacklevel=2)

    def _drop(self) -> bool:
        """Remove the index; return whether that succeeded. A process that has the index open can keep using it."""
        # Rename first, so that other processes find either the whole index or none.
        aside = self._directory.with_name(f"{self._directory.name}.old-{secrets.token_hex(4)}")
        try:
            self._directory.rename(aside)
        except OSError:
            return False  # no index, or a read-only store, whose index stays unused
        shutil.rmtree(aside, ignore_errors=True)  # a leftover is a folder that nobody opens
        return True


def hint_at_dropped(run: str) -> str:
    """Return the hint for *run*, whose commits are all in the trash."""
    return (
        f"its commits were dropped: layerstore log {typed(run)} --dropped lists them, "
        f"layerstore undrop --run {typed(run)} brings them back"
    )


def _errno_of(problem: IndexUnusable) -> int | None:
    cause = problem.__cause__
    while cause is not None:
        # LMDB's errors have `code` instead of `errno`.
        number: int | None = getattr(cause, "errno", None) or getattr(cause, "code", None)
        if number is not None:
            return number
        cause = cause.__cause__
    return None


def _not_made(problem: IndexUnusable, directory: Path) -> StorageIO:
    return StorageIO(
        f"{problem}; no record is lost, and queries work without the index",
        errno=_errno_of(problem),
        filename=str(directory),
        hint="fix that, or set LAYERSTORE_MANIFEST_DIR to another folder, and repeat the command",
    )
