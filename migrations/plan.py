"""
What there is to migrate: which format a store has, which steps lead on, and how much they write. Nothing is written.
"""

import errno as errnos
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from layerstore.errors import IntegrityError, StorageIO, Unsupported
from layerstore.format.identity import FORMAT, decode_identity, format_of
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.migrations import STEPS
from layerstore.migrations.journal import Journal, ended, read_journal
from layerstore.migrations.step import Step
from layerstore.storage.files import Files
from layerstore.storage.identity import hinted, read_identity
from layerstore.storage.layout import Layout, layout_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What a step writes."""

    files: int
    """How many files it makes."""
    size_bytes: int
    """Their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What a migration would do."""

    path: Path
    """Where the store is, links resolved."""
    found: int
    """The format that the store has."""
    newest: int
    """The format that it would have."""
    unfinished: Journal | None
    """What a migration that was interrupted has left to do; the store has its new format already."""
    steps: tuple[Step, ...]
    """The steps still to be taken, in order."""
    volume: Volume | None
    """What the first of them writes; what later ones write follows from what it makes. None where there is none."""
    has_remains: bool
    """Whether there is something of a finished migration to be swept up."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.steps or self.unfinished or self.has_remains)


class OlderFiles:
    """A store's files for a step to look at, in the first of some folders that has them."""

    def __init__(self, files: Files, *roots: Path) -> None:
        self._files = files
        self._roots = roots

    def is_folder(self, path: str) -> bool:
        """Whether *path* is a folder."""
        return any(self._files.is_directory(root / path) for root in self._roots)

    def names(self, folder: str) -> list[str]:
        """Return the names in *folder*, sorted; none where it is not there."""
        for root in self._roots:
            if self._files.is_directory(root / folder):
                return self._files.names(root / folder)
        return []

    def read(self, path: str) -> bytes:
        """Return the bytes of the file *path*."""
        for root in self._roots:
            if self._files.exists(root / path):
                return self._files.read(root / path, size_bytes_max=RECORD_BYTES_MAX)
        raise IntegrityError(f"{path} is gone", path=path)


def plan_migration(path: Path, files: Files | None = None, *, steps: Sequence[Step] = STEPS) -> MigrationPlan:
    """
    Find out what the store at *path* needs to be of the newest format; all that the first step reads is read.

    Raises:
        NoStore: There is none.
        Unsupported: It is of a newer format, or of one that no step leads away from.
        IntegrityError: Something of it is damaged, so that it cannot be converted.
    """
    files = files or Files()
    layout = layout_at(path)
    outlook = look_at(layout, files, path=path, steps=steps)
    if not outlook.steps or outlook.unfinished:
        return outlook
    return MigrationPlan(
        path=outlook.path,
        found=outlook.found,
        newest=outlook.newest,
        unfinished=None,
        steps=outlook.steps,
        volume=measure(layout, files, outlook.steps[0]),
        has_remains=outlook.has_remains,
    )


def look_at(layout: Layout, files: Files, *, path: Path, steps: Sequence[Step]) -> MigrationPlan:
    """Return the plan without its volume: nothing but ``store.json`` and what an interrupted migration left is read."""
    newest = steps[-1].target if steps else FORMAT
    what = str(layout.identity)
    try:
        data = read_identity(layout, files, path=path)
        found = format_of(data, what=what, known=newest)
        if found == FORMAT:
            decode_identity(data, what=what)
    except IntegrityError as exc:
        raise hinted(exc, layout, files) from exc
    todo = tuple(step for step in steps if step.source >= found)
    if found < newest and (not todo or todo[0].source != found):
        raise Unsupported(
            f"{what} is a store of format {found}, from which this layerstore knows no step on; nothing was changed",
            hint="layerstore migrate --list",
        )
    _check_places(layout, files, todo)
    journal = read_journal(layout, files)
    return MigrationPlan(
        path=layout.root,
        found=found,
        newest=newest,
        # One that never came to exchange store.json has changed nothing; if its step is to be taken, it begins afresh.
        unfinished=journal if journal is not None and journal.target == found else None,
        steps=todo,
        volume=None,
        has_remains=files.exists(ended(layout)),
    )


def measure(layout: Layout, files: Files, step: Step) -> Volume:
    """Convert everything once, so that what cannot be converted shows before anything is written; count it."""
    step.identity(files.read(layout.identity, size_bytes_max=RECORD_BYTES_MAX))
    count = size_bytes = 0
    for file in step.convert(OlderFiles(files, layout.root)):
        assert PurePosixPath(file.path).parts[0] in step.makes, "a step stays in the folders that it makes"
        count += 1
        size_bytes += len(file.data)
    return Volume(files=count, size_bytes=size_bytes)


def check_space(layout: Layout, files: Files, volume: Volume) -> None:
    """Raise StorageIO where *volume* does not fit on the disk: better now than in the middle."""
    # Each file takes whole blocks, and its share of a folder.
    needed = volume.size_bytes + 4096 * (volume.files + 16)
    free = files.free_bytes(layout.root)
    if free < needed:
        raise StorageIO(
            f"the migration of {layout.root} needs up to {needed} bytes, {free} are free; nothing was changed",
            errno=errnos.ENOSPC,
            filename=str(layout.root),
            hint="free some space and repeat the command",
        )


def _check_places(layout: Layout, files: Files, steps: Sequence[Step]) -> None:
    """Make sure that every folder that is going to be moved or filled is one, on the store's own filesystem."""
    names = {name for step in steps for name in (*step.leaves, *step.makes)}
    device = files.device(layout.root)
    for folder in (layout.migrating, layout.backups, layout.locks, *(layout.root / name for name in sorted(names))):
        if files.exists(folder) and not (files.is_directory(folder) and files.device(folder) == device):
            raise IntegrityError(
                f"{folder} is no folder of the store's own filesystem; nothing was changed",
                hint="put the folder itself there: what is new is moved into its place",
            )
