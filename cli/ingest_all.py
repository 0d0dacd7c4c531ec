"""``layerstore ingest --all``: many checkpoints, of which some may not be whole."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from layerstore.cli.render import counted, say, say_warning

if TYPE_CHECKING:
    from layerstore.errors import LayerstoreError
    from layerstore.ingest import Ingested
    from layerstore.zero3 import FoundTag

Take: TypeAlias = Callable[[Path, str | None], None]
"""Ingests the checkpoint of a folder and tag, and tells of it."""


@dataclass(slots=True)
class Taken:
    """What came of it, so far."""

    saved: list["Ingested"] = field(default_factory=list)
    problems: list[tuple[Path, "LayerstoreError"]] = field(default_factory=list)

    @property
    def problem_fields(self) -> list[dict[str, object]]:
        """What was not saved, as programs read it."""
        return [
            {
                "path": str(path),
                "kind": problem.kind,
                "code": problem.exit_code,
                "message": problem.message,
                "hint": problem.hint,
            }
            for path, problem in self.problems
        ]

    def raise_first(self) -> None:
        """Raise the first problem, if there was one, so that its exit code is the command's."""
        if self.problems:
            _, first = self.problems[0]
            tried = len(self.saved) + len(self.problems)
            first.message = f"{len(self.problems)} of {counted(tried, 'checkpoint')} not saved: {first.message}"
            raise first


def take_all(folders: Iterable[Path], take: Take, taken: Taken, *, as_json: bool) -> None:
    """
    Ingest every checkpoint below *folders*; one that is not whole keeps no other from being saved.

    What is wrong with the store, its disk or its lock concerns all of them, and ends it at once.
    """
    from layerstore import find_checkpoints

    found = find_checkpoints(*folders)
    for note in found.notes:
        say_warning(note)
    if not as_json:
        say(f"found {counted(len(found.found), 'checkpoint')}")
    for checkpoint in found.found:
        take_or_note(checkpoint, take, taken)


def take_or_note(checkpoint: "FoundTag", take: Take, taken: Taken) -> None:
    """
    Ingest *checkpoint*, or note in *taken* and say what is wrong with it; raise what concerns all.

    Once more where a collection or a repair was faster: what it has taken is written anew.
    """
    from layerstore.errors import LayerstoreError, Overtaken

    try:
        with contextlib.suppress(Overtaken):
            take_one(checkpoint.folder, checkpoint.tag, take)
            return
        take_one(checkpoint.folder, checkpoint.tag, take)
    except LayerstoreError as exc:
        if _concerns_all(exc, checkpoint.folder):
            raise
        say_warning(f"{checkpoint.path} was not saved: {exc}{f'; {exc.hint}' if exc.hint else ''}")
        taken.problems.append((checkpoint.path, exc))


def _concerns_all(problem: "LayerstoreError", folder: Path) -> bool:
    """Whether *problem* is one of the store, its disk or its lock, and not of the checkpoint in *folder*."""
    from layerstore.errors import IntegrityError, Internal, Locked, StorageIO

    if isinstance(problem, StorageIO):
        return not Path(str(problem.filename)).is_relative_to(folder)
    return isinstance(problem, IntegrityError | Internal | Locked)


def take_one(folder: Path, tag: str | None, take: Take) -> None:
    """Ingest one checkpoint; say so if it was removed while it was read, whatever was noticed first."""
    from layerstore.errors import SourceCheckpoint

    place = folder if tag is None else folder / tag
    was_there = place.exists()
    try:
        take(folder, tag)
    except SourceCheckpoint as exc:
        if was_there and not place.exists():
            raise SourceCheckpoint(
                f"{place} was removed while it was read; nothing of it was saved",
                hint="if the job's own rotation did it, ingest sooner, or let the job keep more",
            ) from exc
        raise
