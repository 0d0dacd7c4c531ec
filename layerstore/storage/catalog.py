"""
Records and index together: every question about which commits there are.

The folder listing decides what exists, the record decides what it says, the index only saves reading them all.
Whatever is wrong with the index, the answers are the same.
"""

import secrets
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from layerstore.errors import IntegrityError, LayerstoreError, NotFound
from layerstore.model import Commit, CommitId
from layerstore.storage.commits import RecordName, RecordStore
from layerstore.storage.manifest import Manifest, ManifestUnusable, RecordRow, row_of

Answer = TypeVar("Answer")


class IndexNotice(UserWarning):
    """The index was rebuilt, or cannot be used here; nothing is lost and answers are unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The records of one run, as they stand now."""

    run: str
    rows: dict[CommitId, RecordRow]
    """Every readable record."""
    damaged: dict[RecordName, LayerstoreError]
    """Records that are there and cannot be read."""

    @property
    def hidden(self) -> set[CommitId]:
        """Commits that another one supersedes."""
        return {hidden for row in self.rows.values() for hidden in row.supersedes}

    @property
    def visible(self) -> list[RecordRow]:
        """What a user sees, by attempt and step."""
        hidden = self.hidden
        rows = [row for row in self.rows.values() if row.layers and row.id not in hidden]
        return sorted(rows, key=lambda row: (row.attempt, row.step, row.id))

    @property
    def attempts(self) -> list[int]:
        """The attempts that have visible commits, oldest first."""
        return sorted({row.attempt for row in self.visible})


class Catalog:
    """Answers about runs and commits."""

    def __init__(self, records: RecordStore, *, directory: Path, store_id: str) -> None:
        self._records = records
        self._directory = directory
        self._store_id = store_id
        self._manifest: Manifest | None = None
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
        """Return the runs that have records, by name."""
        return [run for run in self._records.runs() if self._records.names(run)]

    def view(self, run: str) -> RunView:
        """
        Return what *run* holds now.

        Raises:
            NotFound: It has no record.
        """
        # The index first: a commit that is published in between is then merely not indexed yet.
        indexed = self._indexed(run)
        names = self._records.names(run)
        if not names and not indexed:
            raise NotFound(f"there is no run {run!r} in this store", hint=self._known_runs())
        rows = {name.id: indexed[name] for name in names if name in indexed}
        # Remembered, not forgotten: what a lost record had hidden must not come back in silence.
        damaged: dict[RecordName, LayerstoreError] = {name: _vanished(name) for name in indexed.keys() - set(names)}
        unseen: list[tuple[Commit, bytes]] = []
        for name in names:
            if name not in indexed:
                try:
                    data = self._records.read_bytes(name)
                    commit = self._records.decode(data, name)
                except LayerstoreError as exc:
                    damaged[name] = exc
                else:
                    unseen.append((commit, data))
                    rows[name.id] = row_of(commit)
        self._catch_up(unseen)
        return RunView(run=run, rows=rows, damaged=damaged)

    def commit(self, name: RecordName) -> Commit:
        """Read and check the record *name*."""
        return self._records.read(name)

    def _known_runs(self) -> str:
        runs = self.runs()
        return f"runs here: {', '.join(runs[:10])}" if runs else "the store is empty: layerstore ingest CHECKPOINT"

    def remembered_runs(self) -> set[str]:
        """Return the runs that the index knows, whether or not anything is left of them."""
        return {name.run for name in self._with_index(lambda manifest: manifest.rows()) or {}}

    def vanished(self, run: str) -> list[RecordName]:
        """Return the records of *run* that the index remembers and that are not there any more."""
        return sorted(self._indexed(run).keys() - set(self._records.names(run)))

    def differences(self, run: str) -> list[str]:
        """Return what the index says of *run* otherwise than its records do; there should be nothing."""
        indexed = self._indexed(run)
        found = []
        for name, row in indexed.items():
            try:
                commit = self._records.read(name)
            except LayerstoreError:
                continue  # a damaged record is reported for itself
            if row_of(commit) != row:
                found.append(f"the index tells {run}@{name.step} differently than its record does")
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
        self.index_problem = None
        self._opened()
        return sum(len(self.view(run).rows) for run in self.runs())

    def _indexed(self, run: str) -> dict[RecordName, RecordRow]:
        return self._with_index(lambda manifest: manifest.rows(run)) or {}

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
