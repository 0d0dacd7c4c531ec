"""A bar on a terminal, nothing anywhere else: logs, pipes and programs want results, not movement."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Live
    from rich.progress import TaskID

    from layerstore.ops.progress import Progress


class Bar:
    """A `layerstore.ops.progress.Progress` that draws one bar on stderr, gone when the work is done."""

    def __init__(self, live: "Live") -> None:
        self._live = live
        self._task: TaskID | None = None

    def start(self, what: str, total_bytes: int) -> None:
        """Begin the bar anew for the phase *what*; without a total it only shows that something moves."""
        if self._task is not None:
            self._live.remove_task(self._task)
        self._task = self._live.add_task(what, total=total_bytes or None)

    def advance(self, size_bytes: int) -> None:
        """Move the bar; rich's own lock makes this safe in any thread."""
        if self._task is not None:
            self._live.advance(self._task, size_bytes)


@contextlib.contextmanager
def shown_progress(*, as_json: bool) -> Iterator["Progress"]:
    """Yield where a verb tells how far it is."""
    if as_json or not _is_watched():
        from layerstore.ops.progress import Silent

        yield Silent()
        return
    with _live() as live:
        yield Bar(live)


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("LAYERSTORE_NO_PROGRESS")


def _live() -> "Live":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
