"""
Migrate a store to the newest format, step by step (docs/reference/format.md, section 6.12).

New files are written to ``migrating/format-N/``, synced, and read back. Then one rename replaces ``store.json``: before
it, the store has the old format; after it, the new one. From then on, the work only rolls forward: old folders move to
the backup, new ones into their places, and ``migrating/`` is removed. Each move can be repeated, and the content of
``migrating/`` says what is left to do. All locks are held, and a process of an older layerstore checks ``store.json``
after it has published something, and fails.
"""

import contextlib
import errno as errnos
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import ClassVar

from layerstore.disk import Files, lock
from layerstore.errors import Conflict, IntegrityError, StorageIO, Unsupported
from layerstore.format import FORMAT, StoreIdentity, format_of
from layerstore.layout import Layout, layout_at
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.migrations import m0001_lineage
from layerstore.migrations.step import MigratedFile, Older, Step
from layerstore.storage import RecordStore, Trash, hinted, read_identity
from layerstore.units import size

STEPS: tuple[Step, ...] = (m0001_lineage.STEP,)
"""The steps from each format to the next; the last one leads to the format that this layerstore writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step that was taken, or would be."""

    _JSON: ClassVar = "source=step.source target=step.target summary=step.summary files bytes=size_bytes backup"

    step: Step
    files: int | None = None
    """The number of files that it writes; None if that depends on the previous step, or another run wrote them."""
    size_bytes: int | None = None
    """Their bytes."""
    backup: Path | None = None
    """The folder with what was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What a migration did, or would do."""

    _JSON: ClassVar = "path found format unfinished=is_unfinished steps"

    path: Path
    """The store, links resolved."""
    found: int
    """Its format before."""
    format: int
    """Its format after."""
    is_unfinished: bool
    """Whether the first step was interrupted after ``store.json`` was replaced, and only needs to be finished."""
    steps: tuple[StepOutcome, ...]
    """In order; none if there is nothing to do."""


def plan_migration(path: Path, files: Files | None = None, *, steps: Sequence[Step] = STEPS) -> Migration:
    """
    Return the steps that the store at *path* needs; the first is tried without writing.

    Raises what `migrate` raises before it changes anything.
    """
    files = files or Files()
    layout = layout_at(path)
    plan = _look(layout, files, path=path, steps=steps)
    if plan.is_unfinished or not plan.steps:
        return plan
    first, *later = plan.steps
    return replace(plan, steps=(_StepRun(layout, files, first.step).measure(), *later))


def migrate(path: Path, files: Files | None = None, *, steps: Sequence[Step] = STEPS) -> Migration:
    """
    Migrate the store at *path* to the newest format; a store that already has it is not touched.

    Durable once this returns. If it raises or is killed, repeat it: until ``store.json`` is replaced, the store is
    unchanged; after that, only a migration can open it until one has finished.

    Raises:
        NoStore: There is none.
        Unsupported: Its format is newer, or no step starts from it.
        IntegrityError: Something in it is damaged and cannot be converted; nothing was changed.
        StorageIO: There is too little space, or the disk refused.
        Locked: It is in use.
        Conflict: It was written to meanwhile; nothing was changed.
    """
    files = files or Files()
    layout = layout_at(path)
    plan = _look(layout, files, path=path, steps=steps)
    if not plan.steps:
        return plan
    with _locked(layout, files):
        plan = _look(layout, files, path=path, steps=steps)  # look again: we may have waited for another migration
        runs = [_StepRun(layout, files, each.step) for each in plan.steps]
        taken = [runs.pop(0).finish()] if plan.is_unfinished else []
        return replace(plan, steps=(*taken, *(run.take() for run in runs)))


def _look(layout: Layout, files: Files, *, path: Path, steps: Sequence[Step]) -> Migration:
    """Return the plan, from ``store.json`` alone."""
    newest = steps[-1].target if steps else FORMAT
    what = str(layout.identity)
    try:
        data = read_identity(layout, files, path=path)
        found = format_of(data, what=what, known=newest)
        if found == FORMAT:
            StoreIdentity.decode(data, what=what)
    except IntegrityError as exc:
        raise hinted(exc, layout, files) from exc
    todo = [step for step in steps if step.source >= found]
    if found < newest and (not todo or todo[0].source != found):
        raise Unsupported(
            f"{what} is a store of format {found}, which this layerstore cannot migrate; nothing was changed",
            hint="layerstore migrate --list",
        )
    # A step that was interrupted before the exchange starts over: the store still has its source format.
    last = [step for step in steps if step.target == found and files.exists(layout.migrating)]
    _check_places(layout, files, last + todo)
    return Migration(
        path=layout.root,
        found=found,
        format=newest,
        is_unfinished=bool(last),
        steps=tuple(StepOutcome(step=step) for step in last + todo),
    )


def _check_places(layout: Layout, files: Files, steps: Sequence[Step]) -> None:
    """Make sure that everything to be moved is a folder on the store's own filesystem."""
    names = {name for step in steps for name in (*step.leaves, *step.makes)}
    device = files.device(layout.root)
    for folder in (layout.migrating, layout.backups, layout.locks, *(layout.root / name for name in sorted(names))):
        if files.exists(folder) and not (files.is_directory(folder) and files.device(folder) == device):
            raise IntegrityError(
                f"{folder} is no folder of the store's own filesystem; nothing was changed",
                hint="put the folder itself there: what is new is moved into its place",
            )


@contextlib.contextmanager
def _locked(layout: Layout, files: Files) -> Iterator[None]:
    """Hold every lock in the store."""
    files.make_directory(layout.locks)
    names = {"gc.lock", *(name for name in files.names(layout.locks) if name.endswith(".lock"))}
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(lock(layout.locks / name, what=f"locks/{name}"))
        yield


class _StepRun:
    """One step for one store."""

    def __init__(self, layout: Layout, files: Files, step: Step) -> None:
        self._layout = layout
        self._files = files
        self._step = step
        self._root = layout.root
        self._new = Layout(layout.migrated(step.target))
        self._old = Layout(layout.migrating / f"format-{step.source}.old")

    def measure(self) -> StepOutcome:
        """Convert everything without writing, and check that it fits on the disk."""
        self._step.identity(self._read(self._layout.identity))
        sizes = [len(file.data) for file in self._converted()]
        # Each file takes whole blocks, and room in a folder.
        needed, free = sum(sizes) + 4096 * (len(sizes) + 16), self._files.room(self._root).free_bytes
        if free < needed:
            raise StorageIO(
                f"the migration of {self._root} needs up to {size(needed)}, {size(free)} are free; nothing was changed",
                errno=errnos.ENOSPC,
                filename=str(self._root),
                hint="free some space and repeat the command",
            )
        return StepOutcome(step=self._step, files=len(sizes), size_bytes=sum(sizes))

    def take(self) -> StepOutcome:
        """Do the whole step."""
        measured = self.measure()
        self._files.remove_tree(self._layout.migrating)  # left by a migration that did not reach the exchange
        try:
            self._make()
        except BaseException:
            self._files.remove_tree(self._layout.migrating)
            raise
        # If this fails, migrating/ stays: a network filesystem may have done the rename and lost the reply.
        self._files.rename(self._new.identity, self._layout.identity)
        return replace(measured, backup=self.finish().backup)

    def _converted(self) -> Iterator[MigratedFile]:
        for file in self._step.convert(Older(self._files, self._root)):
            assert PurePosixPath(file.path).parts[0] in self._step.makes, "a step stays in the folders that it makes"
            yield file

    def _read(self, path: Path) -> bytes:
        return self._files.read(path, size_bytes_max=RECORD_BYTES_MAX)

    def _make(self) -> None:
        """Write everything new, sync it, and read it back."""
        identity, listed = self._read(self._layout.identity), self._listing()
        folders = {self._old.root, self._new.root, *(self._new.root / name for name in self._step.makes)}
        for folder in sorted(folders):
            self._files.make_directories(folder)
        self._write(self._old.identity, identity)
        self._write(self._new.identity, self._step.identity(identity))
        for file in self._converted():
            path = self._new.root / file.path
            self._files.make_directories(path.parent)
            self._write(path, file.data)
            folders.add(path.parent)
        for folder in sorted(folders):
            self._files.sync_directory(folder)
        if self._step.target == FORMAT:
            self._prove()
        if self._listing() != listed:
            raise Conflict(
                f"{self._root} was written to while it was migrated; nothing was changed",
                hint="stop what writes to it, then repeat the command",
            )

    def _write(self, path: Path, data: bytes) -> None:
        with self._files.create(path) as file:
            file.write_at(0, data)
            file.sync()

    def _listing(self) -> set[Path]:
        """Return the content of the folders to be replaced; a change shows that another process is writing."""
        return {path for name in self._step.makes for path in (self._root / name).rglob("*")}

    def _prove(self) -> None:
        """Read every new record and pin as this layerstore does."""
        store_id = StoreIdentity.decode(self._read(self._new.identity), what="the new store.json").store_id
        records = RecordStore(self._new, self._files, store_id=store_id)
        trash = Trash(self._new, self._files, records)
        for run in records.runs():
            for name in records.names(run):
                records.read(name)
        for name in trash.records():
            trash.read_record(name)
        for pin in records.pin_names():
            records.read_pin(pin)

    def finish(self) -> StepOutcome:
        """Roll forward after the exchange, from wherever it was interrupted."""
        self._files.sync_directory(self._root)  # the process that replaced store.json may have died before this
        for name in (*self._step.makes, *self._step.leaves):
            place, new = self._root / name, self._new.root / name
            is_new = self._files.exists(new)
            # If the new one is already in place, it stays.
            if self._files.exists(place) and (is_new or name in self._step.leaves):
                self._move(place, self._old.root / name)
            if is_new:
                self._move(new, place)
        for path in sorted(path for pattern in self._step.removes for path in self._root.glob(pattern)):
            self._files.remove_tree(path) if self._files.is_directory(path) else self._files.unlink(path)
        backup = None
        if self._files.exists(self._old.root):  # else an earlier run moved it
            self._files.make_directory(self._layout.backups)
            places = (self._layout.backups / f"format-{self._step.source}.{number}" for number in itertools.count(1))
            backup = next(place for place in places if not self._files.exists(place))
            self._move(self._old.root, backup)
        self._files.remove_tree(self._layout.migrating)
        self._files.sync_directory(self._root)
        return StepOutcome(step=self._step, backup=backup)

    def _move(self, source: Path, target: Path) -> None:
        self._files.rename(source, target)
        self._files.sync_directory(target.parent)
        self._files.sync_directory(source.parent)
