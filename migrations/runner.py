"""
Migrate a store to the newest format, step by step (docs/reference/format.md, section 6.12).

New files are written to ``migrating/format-N/`` and synced. Then one rename replaces ``store.json``: before it, the
store has the old format; after it, the new one. From then on, the work only rolls forward: old folders move to the
backup, new ones into their places, and ``migrating/`` is removed. Each move can be repeated, and the content of
``migrating/`` says what is left to do. All locks are held, and a process of an older layerstore checks ``store.json``
after it has published something, and fails.
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


def plan_migration(path: Path, files: Files | None = None) -> Migration:
    """
    Return the steps that the store at *path* needs; the first is tried without writing.

    Raises what `migrate` raises before it changes anything.
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
    unchanged; after that, only a migration can open it until one has finished.

    Raises:
        NoStore: There is none.
        Unsupported: Its format is newer, or no step starts from it.
        IntegrityError: Something in it is damaged and cannot be converted; nothing was changed.
        StorageIO: The disk refused, or is full.
        Locked: It is in use.
        Conflict: It was written to during the migration; nothing was changed.
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
    """Return the plan, from ``store.json`` alone."""
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
    # A step that was interrupted before the exchange starts over: the store still has its source format.
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
    """Hold every lock in the store, or raise Locked at once: a holder may keep one for days."""
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
    files.remove_tree(layout.migrating)  # left by a migration that did not reach the exchange
    try:
        _make(layout, files, step)
    except BaseException:
        files.remove_tree(layout.migrating)
        raise
    # If this fails, migrating/ stays: a network filesystem may have done the rename and lost the reply.
    files.rename(Layout(layout.migrated(step.target)).identity, layout.identity)
    return replace(measured, backup=_finish(layout, files, step).backup)


def _make(layout: Layout, files: Files, step: Step) -> None:
    """Write everything new, and sync it; the old ``store.json`` is the first file of the backup."""
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
    # All of it is durable before the exchange, which is one rename.
    for folder in sorted(folders):
        files.sync_directory(folder)
    if _listing(layout, step) != listed:
        raise Conflict(
            f"{layout.root} was written to while it was migrated; nothing was changed",
            hint="stop what writes to it, then repeat the command",
        )


def _listing(layout: Layout, step: Step) -> set[Path]:
    """Return the paths in the folders to be replaced: a pin takes no lock, and some filesystems have no locks."""
    return {path for name in step.makes for path in (layout.root / name).rglob("*")}


def _backup(layout: Layout, step: Step) -> Path:
    """Return where old folders are collected until the backup is whole and gets its name."""
    return layout.migrating / f"format-{step.source}.old"


def _finish(layout: Layout, files: Files, step: Step) -> StepOutcome:
    """Roll forward after the exchange, from wherever it was interrupted."""

    def move(source: Path, target: Path) -> None:
        files.rename(source, target)
        # The new name first: a power cut may leave a folder under both names, but never under none.
        files.sync_directory(target.parent)
        files.sync_directory(source.parent)

    files.sync_directory(layout.root)  # the process that replaced store.json may have died before this
    old = _backup(layout, step)
    for name in (*step.makes, *step.leaves):
        place, new = layout.root / name, layout.migrated(step.target) / name
        is_new = files.exists(new)
        # If the new one is already in place, it stays.
        if files.exists(place) and (is_new or name in step.leaves):
            move(place, old / name)
        if is_new:
            move(new, place)
    for path in sorted(path for pattern in step.removes for path in layout.root.glob(pattern)):
        files.remove_tree(path) if files.is_directory(path) else files.unlink(path)
    backup = None
    if files.exists(old):  # else an earlier run moved it
        files.make_directory(layout.backups)
        places = (layout.backups / f"format-{step.source}.{number}" for number in itertools.count(1))
        backup = next(place for place in places if not files.exists(place))
        move(old, backup)
    files.remove_tree(layout.migrating)
    files.sync_directory(layout.root)
    return StepOutcome(step=step, backup=backup)
