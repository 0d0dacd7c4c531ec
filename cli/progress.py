"""
Progress: a bar on a terminal, one plain line every half minute in a log, nothing for programs.

The lines of a log come from a thread of their own, so a disk that hangs shows as 0 B/s.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerstore.cli.render import is_quiet, say_progress, size

if TYPE_CHECKING:
    from rich.progress import Progress as Live
    from rich.progress import Task, TaskID
    from rich.text import Text

    from layerstore.progress import Progress

LINE_SECONDS = 30.0
"""From one line in a log to the next."""

_UNITS = ((3600, "h"), (60, "min"), (1, "s"))


class Bar:
    """A `layerstore.progress.Progress` that draws a bar on stderr, removed at the end."""

    def __init__(self, live: "Live") -> None:
        self._live = live
        self._task: TaskID | None = None

    def start(self, what: str, total_bytes: int) -> None:
        """Restart the bar for the phase *what*; without a total it only shows activity."""
        if self._task is not None:
            self._live.remove_task(self._task)
        self._task = self._live.add_task(what, total=total_bytes or None, is_counted=_is_counted(what))

    def advance(self, size_bytes: int) -> None:
        """Move the bar; rich's own lock makes this safe in any thread."""
        if self._task is not None:
            self._live.advance(self._task, size_bytes)


@dataclass(frozen=True, slots=True)
class Phase:
    """The state of a phase at one moment."""

    what: str
    total: int
    done: int
    seconds: float
    """Since it began."""


class Lines:
    """A `layerstore.progress.Progress` that says where it is every half minute, in one line on stderr."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._what = ""  # until the first phase
        self._total = self._done = 0
        self._began = 0.0

    def start(self, what: str, total_bytes: int) -> None:
        """Begin the phase *what*."""
        with self._guard:
            self._what, self._total, self._done, self._began = what, total_bytes, 0, time.monotonic()

    def advance(self, size_bytes: int) -> None:
        """Count *size_bytes* more."""
        with self._guard:
            self._done += size_bytes

    def speak(self, stop: threading.Event, *, every_seconds: float) -> None:
        """Print a line every *every_seconds* until *stop* is set."""
        before: Phase | None = None
        while not stop.wait(every_seconds):
            with self._guard:
                phase = Phase(self._what, self._total, self._done, time.monotonic() - self._began)
            try:
                if phase.what:
                    say_progress(progress_line(phase, before))
            except OSError:  # nobody reads the log any more; the work goes on
                return
            before = phase


def progress_line(phase: Phase, before: Phase | None) -> str:
    """
    Return a line of a log: share, amount, rate since the line *before*, and time left.

    >>> progress_line(Phase("ingest", 10**9, 25 * 10**7, 60), Phase("ingest", 10**9, 10**8, 30))
    'ingest: 25%, 250.0 MB of 1.0 GB, 5.0 MB/s, 3 min left'
    >>> progress_line(Phase("records of sft", 0, 1200, 30), None)
    'records of sft: 1,200, 40/s'
    >>> progress_line(Phase("verify", 10**9, 10**8, 60), Phase("verify", 10**9, 10**8, 30))
    'verify: 10%, 100.0 MB of 1.0 GB, 0 B/s'
    """
    # A phase that started since then has a rate of its own.
    is_same = before is not None and before.what == phase.what and before.seconds < phase.seconds
    done, seconds = (before.done, before.seconds) if before is not None and is_same else (0, 0.0)
    rate = (phase.done - done) / max(phase.seconds - seconds, 1e-3)
    amount = "{:,}".format if _is_counted(phase.what) else size
    parts = [
        *([f"{min(phase.done / phase.total, 1):.0%}"] if phase.total else []),
        f"{amount(phase.done)} of {amount(phase.total)}" if phase.total else amount(phase.done),
        f"{amount(round(rate))}/s",
        *([f"{_duration((phase.total - phase.done) / rate)} left"] if 0 < phase.done < phase.total and rate else []),
    ]
    return f"{phase.what}: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    """
    Return *seconds* in the largest unit that has two of them, rounded up.

    >>> _duration(0.2), _duration(90), _duration(150), _duration(9000)
    ('1 s', '90 s', '3 min', '3 h')
    """
    length, unit = next((each for each in _UNITS if seconds >= 2 * each[0]), _UNITS[-1])
    return f"{-int(-seconds // length):,} {unit}"


def _is_counted(what: str) -> bool:
    """Whether the phase counts records instead of bytes."""
    return what.startswith("records")


@contextlib.contextmanager
def shown_progress(*, as_json: bool, every_seconds: float = LINE_SECONDS) -> Iterator["Progress"]:
    """Yield what a verb reports its progress to."""
    if as_json or is_quiet() or sys.stderr is None or os.environ.get("LAYERSTORE_NO_PROGRESS"):
        from layerstore.progress import Silent

        yield Silent()
    elif sys.stderr.isatty():
        with _live() as live:
            yield Bar(live)
    else:
        lines, stop = Lines(), threading.Event()
        options = {"every_seconds": every_seconds}
        speaker = threading.Thread(target=lines.speak, args=(stop,), kwargs=options, daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads allowed: work without lines
            speaker.start()
        try:
            yield lines
        finally:
            stop.set()
            if speaker.ident is not None:
                speaker.join()


def _live() -> "Live":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.text import Text

    class Amount(DownloadColumn):
        """The amount done, in bytes or records."""

        def render(self, task: "Task") -> "Text":
            if not task.fields["is_counted"]:
                return super().render(task)
            total = "" if task.total is None else f"/{task.total:,.0f}"
            return Text(f"{task.completed:,.0f}{total}", style="progress.download")

    class Speed(TransferSpeedColumn):
        """The rate; empty for records, whose time left says as much."""

        def render(self, task: "Task") -> "Text":
            return Text("") if task.fields["is_counted"] else super().render(task)

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        Amount(),
        Speed(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
