"""``layerstore ingest --watch``: follow a job that writes checkpoints, until somebody ends it."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from layerstore.cli.ingest_all import Take, Taken, take_or_note
from layerstore.cli.render import counted, say, say_warning, shown

if TYPE_CHECKING:
    from layerstore.zero3 import FoundTag

POLL_SECONDS = 2.0
"""How often the folders are looked at."""

REST_SECONDS = 10.0
"""A checkpoint in which nothing has changed for so long is complete: no writer pauses so long between its files."""


def watch(
    folders: Iterable[Path], take: Take, taken: Taken, *, rest_seconds: float = REST_SECONDS, as_json: bool
) -> None:
    """
    Ingest every checkpoint below *folders*, and each that comes, once it has come to rest; ends when interrupted.

    What is not whole is looked at again when it has changed.

    Raises:
        KeyboardInterrupt: Somebody has ended it, whatever it was at; what was *taken* stays.
    """
    tops = list(folders)
    seen: dict[Path, int] = {}
    for top in tops:
        if not top.exists():
            say_warning(f"{shown(top)} is not there yet; it is waited for")
    if not as_json:
        say(f"watching {', '.join(shown(top) for top in tops)}; Ctrl-C ends it")
    try:
        _follow(tops, seen, take, taken, rest_seconds=rest_seconds)
    finally:
        if not as_json:
            say(f"stopped watching: {counted(len(taken.saved), 'checkpoint')} taken, {len(taken.problems)} not saved")


def _follow(tops: list[Path], seen: dict[Path, int], take: Take, taken: Taken, *, rest_seconds: float) -> NoReturn:
    while True:
        for checkpoint in _found(tops):
            newest = _newest_change(checkpoint)
            is_at_rest = newest is not None and time.time_ns() - newest > rest_seconds * 1e9
            if newest is None or not is_at_rest or seen.get(checkpoint.path) == newest:
                continue
            seen[checkpoint.path] = newest
            take_or_note(checkpoint, take, taken)
        time.sleep(POLL_SECONDS)


def _found(tops: list[Path]) -> Iterator["FoundTag"]:
    from layerstore import find_checkpoints
    from layerstore.errors import SourceCheckpoint

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
