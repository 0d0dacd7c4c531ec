"""``layerstore ingest --all`` and ``--watch``: every checkpoint below some folders, of which some may not be whole."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from layerstore.cli.render import counted, say, say_warning, shown
from layerstore.errors import IntegrityError, Internal, LayerstoreError, Locked, Overtaken, SourceCheckpoint, StorageIO
from layerstore.json_fields import json_fields

if TYPE_CHECKING:
    from layerstore.ingest import Ingested
    from layerstore.zero3 import FoundTag

POLL_SECONDS = 2.0
"""How often a watch looks at the folders."""

REST_SECONDS = 10.0
"""A checkpoint in which nothing changed for so long is complete: no writer pauses so long between its files."""

Take: TypeAlias = Callable[[Path, str | None], None]
"""Ingests the checkpoint of a folder and tag, and tells of it."""


@dataclass(slots=True)
class IngestBatch:
    """What came of many checkpoints, so far."""

    saved: list["Ingested"] = field(default_factory=list)
    problems: list[tuple[Path, "LayerstoreError"]] = field(default_factory=list)

    @property
    def fields(self) -> dict[str, object]:
        """What programs read of it."""
        problems = [
            {"path": str(path), "kind": of.kind, "code": of.exit_code, "message": of.message, "hint": of.hint}
            for path, of in self.problems
        ]
        return {"commits": [json_fields(ingested) for ingested in self.saved], "problems": problems}

    def raise_first(self) -> None:
        """Raise the first problem, if there was one, so that its exit code is the command's."""
        if self.problems:
            _, first = self.problems[0]
            tried = len(self.saved) + len(self.problems)
            first.message = f"{len(self.problems)} of {counted(tried, 'checkpoint')} not saved: {first.message}"
            raise first


def take_all(folders: Iterable[Path], take: Take, batch: IngestBatch, *, as_json: bool) -> None:
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
        take_or_note(checkpoint, take, batch)


def take_or_note(checkpoint: "FoundTag", take: Take, batch: IngestBatch) -> None:
    """
    Ingest *checkpoint*, or note in *batch* and say what is wrong with it; raise what concerns all.

    Once more where a collection or a repair was faster: what it has taken is written anew.
    """
    try:
        with contextlib.suppress(Overtaken):
            take_one(checkpoint.folder, checkpoint.tag, take)
            return
        take_one(checkpoint.folder, checkpoint.tag, take)
    except LayerstoreError as exc:
        if _concerns_all(exc, checkpoint.folder):
            raise
        say_warning(f"{checkpoint.path} was not saved: {exc}{f'; {exc.hint}' if exc.hint else ''}")
        batch.problems.append((checkpoint.path, exc))


def _concerns_all(problem: "LayerstoreError", folder: Path) -> bool:
    """Whether *problem* is one of the store, its disk or its lock, and not of the checkpoint in *folder*."""
    if isinstance(problem, StorageIO):
        return not Path(str(problem.filename)).is_relative_to(folder)
    return isinstance(problem, IntegrityError | Internal | Locked)


def take_one(folder: Path, tag: str | None, take: Take) -> None:
    """Ingest one checkpoint; say so if it was removed while it was read, whatever was noticed first."""
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


# -- following a job -----------------------------------------------------------------------------------------------


def watch(folders: Iterable[Path], take: Take, batch: IngestBatch, *, as_json: bool) -> None:
    """
    Ingest every checkpoint below *folders*, and each that comes, once it has come to rest; ends when interrupted.

    What is not whole is looked at again when it has changed.

    Raises:
        KeyboardInterrupt: Somebody has ended it, whatever it was at; what is in *batch* stays.
    """
    tops = list(folders)
    for top in tops:
        if not top.exists():
            say_warning(f"{shown(top)} is not there yet; it is waited for")
    if not as_json:
        say(f"watching {', '.join(shown(top) for top in tops)}; Ctrl-C ends it")
    try:
        _follow(tops, take, batch)
    finally:
        if not as_json:
            say(f"stopped watching: {counted(len(batch.saved), 'checkpoint')} taken, {len(batch.problems)} not saved")


def _follow(tops: list[Path], take: Take, batch: IngestBatch) -> NoReturn:
    seen: dict[Path, int] = {}
    while True:
        for checkpoint in _found(tops):
            newest = _newest_change(checkpoint)
            is_at_rest = newest is not None and time.time_ns() - newest > REST_SECONDS * 1e9
            if newest is None or not is_at_rest or seen.get(checkpoint.path) == newest:
                continue
            seen[checkpoint.path] = newest
            take_or_note(checkpoint, take, batch)
        time.sleep(POLL_SECONDS)


def _found(tops: list[Path]) -> Iterator["FoundTag"]:
    from layerstore import find_checkpoints

    for top in tops:
        try:
            found = find_checkpoints(top).found
        except SourceCheckpoint:
            continue  # nothing there yet, or a rotation is just removing something
        yield from found


def _newest_change(checkpoint: "FoundTag") -> int | None:
    """Return when a file of *checkpoint* was last changed, None if it is gone."""
    newest = 0
    try:
        for folder in (checkpoint.folder, checkpoint.path):
            with os.scandir(folder) as entries:
                newest = max([newest, *(entry.stat().st_mtime_ns for entry in entries)])
    except OSError:
        return None
    return newest
