"""
Migrate a store to the newest format, step by step (docs/reference/format.md, section 6.12).

New files are written to ``migrating/format-N/`` and synced. Then one rename replaces ``store.json``: before it, the
store has the old format; after it, the new one. After the rename, a migration only rolls forward: old folders move to
the backup, new ones replace them, and ``migrating/`` is removed. Each move can be repeated, and the content of
``migrating/`` shows what is left to do. All locks are held; a process of an older layerstore that publishes something
checks ``store.json`` afterwards, and fails.
"""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from layerstore.disk import Files, lock
from layerstore.errors import Conflict, IntegrityError, Unsupported
from layerstore.format import FORMAT, StoreIdentity, format_of
from layerstore.layout import Layout, layout_at
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.migrations import m0001_lineage
from layerstore.migrations.step import Older, Step
from layerstore.storage import hinted, read_identity

STEPS: tuple[Step, ...] = (m0001_lineage.STEP,)
"""The steps from each format to the next; the last one leads to the format that this layerstore writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """A step that was taken, or would be."""

    _JSON: ClassVar = "source=step.source target=step.target summary=step.summary files bytes=size_bytes backup"

    step: Step
    files: int | None = None
    """The number of files that the step writes; None if the previous step decides it, or an earlier run wrote them."""
    size_bytes: int | None = None
    """The total size of these files."""
    backup: Path | None = None
    """The folder with what was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """What a migration did, or would do."""

    _JSON: ClassVar = "path found format unfinished=is_unfinished steps"

    path: Path
    """The store's path, with links resolved."""
    found: int
    """The store's format before the migration."""
    format: int
    """The store's format after the migration."""
    is_unfinished: bool
    """Whether the first step was interrupted after ``store.json`` was replaced, and only needs to be finished."""
    steps: tuple[StepOutcome, ...]
    """The steps, in order; none if there is nothing to do."""


def plan_migration(path: Path, files: Files | None = None) -> Migration:
    """
    Return the steps that the store at *path* needs; the first step is tried without writing anything.

    Raises the errors that `migrate` raises before changing anything.
    """
    layout, files = layout_at(path), files or Files()
    plan = _look(layout, files, path=path)
    if plan.is_unfinished or not plan.steps:
        return plan
    first, *later = plan.steps
    return replace(plan, steps=(_measured(layout, files, first.step), *later))


def migrate(path: Path, files: Files | None = None) -> Migration:
    """
    Migrate the store at *path* to the newest format; a store that already has it is not touched.

    Durable once this returns. If it raises or is killed, repeat it: until ``store.json`` is replaced, the store is
    unchanged; after that, only a migration can open the store, until one has finished.

    Raises:
        NoStore: *path* holds no store.
        Unsupported: The store's format is newer, or no step starts from that format.
        IntegrityError: Something in the store is damaged and cannot be converted; nothing was changed.
        StorageIO: The disk refused, or is full.
        Locked: The store is in use.
        Conflict: The store was written to during the migration; nothing was changed.
    """
    layout, files = layout_at(path), files or Files()
    plan = _look(layout, files, path=path)
    if not plan.steps:
        return plan
    with _locked(layout, files):
        plan = _look(layout, files, path=path)  # another migration may have ended since
        todo = [outcome.step for outcome in plan.steps]
        finished = [_finish(layout, files, todo.pop(0))] if plan.is_unfinished else []
        return replace(plan, steps=(*finished, *(_take(layout, files, step) for step in todo)))


def _look(layout: Layout, files: Files, *, path: Path) -> Migration:
    """Return the plan, with the steps not yet measured; of the store's files, only ``store.json`` is read."""
    what = str(layout.identity)
    try:
        data = read_identity(layout, files, path=path)
        stated = format_of(data, what=what, known=FORMAT)
        if stated == FORMAT:
            StoreIdentity.decode(data, what=what)
    except IntegrityError as exc:
        raise hinted(exc, layout, files) from exc
    if stated not in {FORMAT, *(step.source for step in STEPS)}:
        raise Unsupported(
            f"{what} is a store of format {stated}, which this layerstore cannot migrate; nothing was changed",
            hint="layerstore migrate --list",
        )
    # A step that was interrupted before store.json was replaced starts over: the store has the step's source format.
    last = [step for step in STEPS if step.target == stated and files.exists(layout.migrating)]
    todo = last + [step for step in STEPS if step.source >= stated]
    _check_places(layout, files, todo)
    return Migration(
        path=layout.root,
        found=stated,
        format=FORMAT,
        is_unfinished=bool(last),
        steps=tuple(StepOutcome(step=step) for step in todo),
    )


def _check_places(layout: Layout, files: Files, steps: Sequence[Step]) -> None:
    """Make sure that everything to be moved is a folder on the store's own filesystem."""
    names = {name for step in steps for name in (*step.leaves, *step.makes)}
    device = files.device(layout.root)
    for folder in (layout.migrating, layout.backups, layout.locks, *(layout.root / name for name in sorted(names))):
        if files.exists(folder) and not (files.is_directory(folder) and files.device(folder) == device):
            raise IntegrityError(
                f"{folder} is not a folder of the store's own filesystem; nothing was changed",
                hint="put the folder itself there: a new folder is moved into its place",
            )


@contextlib.contextmanager
def _locked(layout: Layout, files: Files) -> Iterator[None]:
    """Hold every lock in the store, or raise Locked at once: a holder may keep a lock for days."""
    files.make_directory(layout.locks)
    names = {"gc.lock", *(name for name in files.names(layout.locks) if name.endswith(".lock"))}
    with contextlib.ExitStack() as stack:
        for name in sorted(names):
            stack.enter_context(lock(layout.locks / name, what=f"locks/{name}", deadline_seconds=0))
        yield


def _measured(layout: Layout, files: Files, step: Step) -> StepOutcome:
    """Convert everything without writing: whatever is damaged or unknown is found before anything is changed."""
    step.identity(files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX))
    sizes = [len(data) for _, data in step.convert(Older(files, layout.root))]
    return StepOutcome(step=step, files=len(sizes), size_bytes=sum(sizes))


def _take(layout: Layout, files: Files, step: Step) -> StepOutcome:
    measured = _measured(layout, files, step)
    files.remove_tree(layout.migrating)  # left by a migration that did not replace store.json
    try:
        _make(layout, files, step)
    except BaseException:
        files.remove_tree(layout.migrating)
        raise
    # If this fails, migrating/ stays: a network filesystem may have done the rename and lost the reply.
    files.rename(Layout(layout.migrated(step.target)).identity, layout.identity)
    return replace(measured, backup=_finish(layout, files, step).backup)


def _make(layout: Layout, files: Files, step: Step) -> None:
    """Write and sync all new files, and the old ``store.json`` as the first file of the backup."""
    new, old = layout.migrated(step.target), _backup(layout, step)
    identity, listed = files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX), _listing(layout, step)
    folders = {new, old, *(new / name for name in step.makes)}
    for folder in folders:
        files.make_directories(folder)
    converted = ((new / name, data) for name, data in step.convert(Older(files, layout.root)))
    identities = ((old / "store.json", identity), (new / "store.json", step.identity(identity)))
    for path, data in itertools.chain(identities, converted):
        files.make_directories(path.parent)
        with files.create(path) as file:
            file.write_at(0, data)
            file.sync()
        folders.add(path.parent)
    # Everything is durable before one rename replaces store.json.
    for folder in sorted(folders):
        files.sync_directory(folder)
    if _listing(layout, step) != listed:
        raise Conflict(
            f"{layout.root} was written to while it was migrated; nothing was changed",
            hint="stop what writes to it, then repeat the command",
        )


def _listing(layout: Layout, step: Step) -> set[Path]:
    """
    Return the paths in the folders to be replaced, so that writes made without a lock are noticed.

    Pins are written without a lock, and if the filesystem lacks flock, so is everything else.
    """
    return {path for name in step.makes for path in (layout.root / name).rglob("*")}


def _backup(layout: Layout, step: Step) -> Path:
    """Return the folder that collects old folders until the backup is complete, and is then renamed."""
    return layout.migrating / f"format-{step.source}.old"


def _finish(layout: Layout, files: Files, step: Step) -> StepOutcome:
    """Finish *step* after ``store.json`` was replaced, from wherever an earlier run was interrupted."""

    def move(source: Path, target: Path) -> None:
        files.rename(source, target)
        # Sync the new parent first: a power cut may then leave the folder under both names, but never under neither.
        files.sync_directory(target.parent)
        files.sync_directory(source.parent)

    files.sync_directory(layout.root)  # the process that replaced store.json may have died before this sync
    old = _backup(layout, step)
    for name in (*step.makes, *step.leaves):
        place, new = layout.root / name, layout.migrated(step.target) / name
        is_new = files.exists(new)
        # If an earlier run has already moved the new folder here, *place* is that folder, and stays.
        if files.exists(place) and (is_new or name in step.leaves):
            move(place, old / name)
        if is_new:
            move(new, place)
    for path in sorted(path for pattern in step.removes for path in layout.root.glob(pattern)):
        files.remove_tree(path) if files.is_directory(path) else files.unlink(path)
    backup = None
    if files.exists(old):  # otherwise, an earlier run moved it
        files.make_directory(layout.backups)
        places = (layout.backups / f"format-{step.source}.{number}" for number in itertools.count(1))
        backup = next(place for place in places if not files.exists(place))
        move(old, backup)
    files.remove_tree(layout.migrating)
    files.sync_directory(layout.root)
    return StepOutcome(step=step, backup=backup)
