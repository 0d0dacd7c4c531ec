"""
Take a store to the newest format, step by step, so that it can be read at any moment.

For each step (docs/reference/format.md, section 6.12): everything new is made beside what is there, in folders that the
old format does not read; then ``store.json`` is exchanged by one rename; then what only the old format read goes to the
backup, and what came meanwhile is converted too. A crash before the rename leaves the old store and things that it
ignores, a crash after it the new store; the same command then goes on.

Locks keep other commands away for as long as it takes, and nothing rests on them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import IntegrityError
from layerstore.format.identity import FORMAT, decode_identity
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.migrations import STEPS
from layerstore.migrations.journal import Journal, encode_journal, ended, journal_path
from layerstore.migrations.plan import OlderFiles, check_space, look_at, measure
from layerstore.migrations.step import NewFile, Step
from layerstore.storage.commits import RecordStore
from layerstore.storage.files import Files
from layerstore.storage.layout import Layout, layout_at
from layerstore.storage.locks import deadline_seconds, lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that was taken, or finished."""

    step: Step
    """Which."""
    files: int
    """How many files are new."""
    came_meanwhile: int
    """How many of them came from what somebody wrote while the step was taken."""
    backup: Path
    """The folder that has what the old format read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrated:
    """What a migration has done."""

    path: Path
    """Where the store is, links resolved."""
    found: int
    """The format that it had."""
    format: int
    """The format that it has."""
    taken: tuple[Taken, ...]
    """The steps, in order; none if there was nothing to do."""


def migrate(path: Path, files: Files | None = None, *, steps: Sequence[Step] = STEPS) -> Migrated:
    """
    Take the store at *path* to the newest format.

    Once this returns the store is of that format, also after a power cut. If it raises, or is killed, the store is of
    the old format or of a newer one, whole, and the same call goes on. A store that has nothing to do is not touched.

    Raises:
        NoStore: There is none.
        Unsupported: It is of a newer format, or of one that no step leads away from.
        IntegrityError: Something of it is damaged, so that it cannot be converted; nothing was changed.
        Locked: Somebody works with it.
    """
    files = files or Files()
    layout = layout_at(path)
    outlook = look_at(layout, files, path=path, steps=steps)
    if outlook.is_done:
        return Migrated(path=layout.root, found=outlook.found, format=outlook.found, taken=())
    with _locked(layout, files):
        outlook = look_at(layout, files, path=path, steps=steps)
        taken = [*_finished(layout, files, outlook.unfinished, steps)]
        files.remove_tree(ended(layout))
        taken += [_Taking(layout, files, step).take() for step in outlook.steps]
    return Migrated(path=layout.root, found=outlook.found, format=outlook.newest, taken=tuple(taken))


@contextlib.contextmanager
def _locked(layout: Layout, files: Files) -> Iterator[None]:
    """Hold every lock that there is, and that of collections, so that whoever works with the store is waited for."""
    files.make_directory(layout.locks)
    names = {"gc.lock", *(name for name in files.names(layout.locks) if name.endswith(".lock"))}
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(lock(layout.locks / name, what=f"locks/{name}", deadline_seconds=deadline_seconds()))
        yield


def _finished(layout: Layout, files: Files, journal: Journal | None, steps: Sequence[Step]) -> Iterator[Taken]:
    if journal is None:
        return
    step = next((step for step in steps if (step.source, step.target) == (journal.source, journal.target)), None)
    if step is None:
        raise IntegrityError(
            f"the store is in the middle of a migration from format {journal.source} to {journal.target}, "
            "a step that this layerstore does not have; nothing was changed",
            hint="use the layerstore that began it",
        )
    yield _Taking(layout, files, step).finish(journal)


class _Taking:
    """One step being taken."""

    def __init__(self, layout: Layout, files: Files, step: Step) -> None:
        self._layout = layout
        self._files = files
        self._step = step
        self._new = layout.migrating / "new"

    def take(self) -> Taken:
        """Do all of it."""
        check_space(self._layout, self._files, measure(self._layout, self._files, self._step))
        self._files.remove_tree(self._layout.migrating)  # of one that never came to exchange store.json
        try:
            journal = self._stage()
            self._place()
        except BaseException:
            self._files.remove_tree(self._layout.migrating)
            raise
        # If this fails, what is in migrating/ stays: a network filesystem may have done it and lost the answer.
        self._exchange()
        return self.finish(journal)

    # -- before the exchange: nothing that the old format reads is touched ----------------------------------------

    def _stage(self) -> Journal:
        """Make all that is new in ``migrating/``, durable; and the backup, with the ``store.json`` that is there."""
        old_identity = self._files.read(self._layout.identity, size_bytes_max=RECORD_BYTES_MAX)
        new_identity = self._step.identity(old_identity)
        for folder in (self._layout.migrating, self._new):
            self._files.make_directory(folder)
        folders = {self._new, *(self._new / name for name in self._step.makes)}
        for folder in sorted(folders - {self._new}):
            self._files.make_directory(folder, durable=False)
        paths = []
        for file in self._step.convert(OlderFiles(self._files, self._layout.root)):
            self._make_folders((self._new / file.path).parent, folders)
            self._write(self._new / file.path, file.data)
            paths.append(file.path)
        for folder in sorted(folders):
            self._files.sync_directory(folder)
        self._write(self._layout.migrating / "store.json", new_identity)
        self._prove(new_identity)
        journal = Journal(
            source=self._step.source, target=self._step.target, backup=self._backed_up(old_identity), files=tuple(paths)
        )
        unnamed = self._layout.migrating / "journal.new"
        self._write(unnamed, encode_journal(journal))
        self._files.rename(unnamed, journal_path(self._layout))
        self._files.sync_directory(self._layout.migrating)
        return journal

    def _make_folders(self, folder: Path, known: set[Path]) -> None:
        if folder not in known:
            self._make_folders(folder.parent, known)
            self._files.make_directory(folder, durable=False)
            known.add(folder)

    def _write(self, path: Path, data: bytes) -> None:
        with self._files.create(path) as file:
            file.write_at(0, data)
            file.sync()

    def _prove(self, identity: bytes) -> None:
        """Read all that was made as this layerstore would, where it is this one's own format."""
        if self._step.target != FORMAT:
            return
        store_id = decode_identity(identity, what="the new store.json").store_id
        made = Layout(self._new)
        if not self._files.is_directory(made.commits):
            return  # the step makes no records
        records = RecordStore(made, self._files, store_id=store_id)
        for run in records.runs():
            for name in records.names(run):
                records.read(name)
        for pin in self._files.names(made.pins):
            records.read_pin(pin)

    def _backed_up(self, identity: bytes) -> str:
        """Make the folder of the backup, or take the one of an attempt that came no further; return its name."""
        self._files.make_directory(self._layout.backups)
        numbered = _numbered(self._layout.backups, f"format-{self._step.source}")
        backup = next(folder for folder in numbered if self._is_free(folder, identity))
        self._files.make_directory(backup)
        self._files.make_directory(_folders(backup))
        # A copy, not a second name: where there are no hard links store.json would give up its own.
        unnamed = self._layout.migrating / "store.json.old"
        self._write(unnamed, identity)
        self._files.link_exclusive(unnamed, backup / "store.json")
        self._files.sync_directory(backup)
        return backup.name

    def _is_free(self, backup: Path, identity: bytes) -> bool:
        """Whether *backup* is not there, or has nothing but this very ``store.json``."""
        if self._files.names(_folders(backup)) or set(self._files.names(backup)) - {"folders", "store.json"}:
            return False
        kept = backup / "store.json"
        return not self._files.exists(kept) or self._files.read(kept, size_bytes_max=RECORD_BYTES_MAX) == identity

    def _place(self) -> None:
        """Move the new folders to the top of the store, where the old format does not look."""
        for name in self._step.makes:
            place = self._layout.root / name
            if self._files.exists(place):
                # Of an attempt that was interrupted here, or of a migration that somebody has undone.
                unused = _numbered(self._layout.backups, f"format-{self._step.target}-unused")
                aside = next(folder for folder in unused if not self._files.exists(folder / name))
                self._files.make_directory(aside)
                self._files.rename(place, aside / name)
                self._files.sync_directory(aside)
            self._files.rename(self._new / name, place)
        self._files.sync_directory(self._layout.root)

    def _exchange(self) -> None:
        """Exchange ``store.json``: from here on the store is of the new format."""
        self._files.rename(self._layout.migrating / "store.json", self._layout.identity)
        self._files.sync_directory(self._layout.root)

    # -- after it -------------------------------------------------------------------------------------------------

    def finish(self, journal: Journal) -> Taken:
        """Move what only the old format read to the backup, and look for what came before that was done."""
        self._files.sync_directory(self._layout.root)  # whoever exchanged store.json may have died before doing so
        backup = self._layout.backups / journal.backup
        for name in self._step.leaves:
            place, kept = self._layout.root / name, _folders(backup) / name
            if self._files.exists(place) and not self._files.exists(kept):
                self._files.rename(place, kept)
        self._files.sync_directory(_folders(backup))
        self._files.sync_directory(self._layout.root)
        came = self._convert_late(backup, frozenset(journal.files))
        self._files.rename(self._layout.migrating, ended(self._layout))
        self._files.sync_directory(self._layout.root)
        self._files.remove_tree(ended(self._layout))
        return Taken(step=self._step, files=len(journal.files) + came, came_meanwhile=came, backup=backup)

    def _convert_late(self, backup: Path, known: frozenset[str]) -> int:
        """Convert what was written to the old folders after they were read; nobody can write to them any more."""
        count = 0
        # The backup has the old store.json, which the step may want to look at again.
        older = OlderFiles(self._files, _folders(backup), backup, self._layout.root)
        try:
            for file in self._step.convert(older):
                if file.path not in known:
                    self._publish(file)
                    count += 1
        except IntegrityError as exc:
            exc.locate(f"{_folders(backup)}, written while the store was migrated")
            raise
        return count

    def _publish(self, file: NewFile) -> None:
        target = self._layout.root / file.path
        self._files.make_directory(target.parent)
        with self._files.temporary(self._layout.migrating) as temporary:
            temporary.write_at(0, file.data)
            temporary.sync()
            self._files.link_exclusive(temporary.path, target)
        self._files.sync_directory(target.parent)


def _folders(backup: Path) -> Path:
    return backup / "folders"


def _numbered(parent: Path, stem: str) -> Iterator[Path]:
    number = 0
    while True:
        number += 1
        yield parent / f"{stem}.{number}"
