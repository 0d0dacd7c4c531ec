"""
Progress on stderr: on a terminal, a line with a bar, redrawn in place; in a log, a new line every half minute.

A separate thread writes the lines, so a hanging disk shows in a log as 0 B/s.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerstore.cli.render import draw, output, print_progress
from layerstore.threads import start
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.progress import Progress

LINE_SECONDS = 30.0
"""The time between lines in a log."""

_DRAW_SECONDS = 0.2
_BAR_WIDTH_MIN, _BAR_WIDTH_MAX = 10, 20
_UNITS = ((3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True, slots=True)
class Phase:
    """The state of a phase at one moment."""

    what: str
    total: int
    done: int
    seconds: float
    """The time since the phase began."""


class Lines:
    """A `layerstore.progress.Progress` that shows its state in one line on stderr."""

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self._guard = threading.Lock()
        self._what = ""  # empty until the first phase
        self._total = self._done = 0
        self._began = 0.0

    def start(self, what: str, total_bytes: int) -> None:
        """Begin the phase *what*."""
        with self._guard:
            self._what, self._total, self._done, self._began = what, total_bytes, 0, time.monotonic()
        if self._is_live:
            self._show(None)

    def advance(self, size_bytes: int) -> None:
        """Count *size_bytes* more."""
        with self._guard:
            self._done += size_bytes

    def speak(self, stop: threading.Event, every_seconds: float) -> None:
        """Show a line every *every_seconds* until *stop* is set."""
        before: Phase | None = None
        while not stop.wait(every_seconds):
            before = self._show(None if self._is_live else before)

    def _show(self, before: Phase | None) -> Phase:
        with self._guard:
            phase = Phase(self._what, self._total, self._done, time.monotonic() - self._began)
        with contextlib.suppress(OSError):  # nobody reads stderr now, but the work continues
            if phase.what:
                if self._is_live:
                    draw(bar_line(phase, width=shutil.get_terminal_size().columns))
                else:
                    print_progress(progress_line(phase, before))
        return phase


def progress_line(phase: Phase, before: Phase | None) -> str:
    """
    Return a line of a log: share, amount, rate since the earlier state *before*, and time left.

    >>> progress_line(Phase("ingest", 10**9, 25 * 10**7, 60), Phase("ingest", 10**9, 10**8, 30))
    'ingest: 25%, 250.0 MB of 1.0 GB, 5.0 MB/s, 3 min left'
    >>> progress_line(Phase("records of sft", 0, 1200, 30), None)
    'records of sft: 1,200, 40/s'
    >>> progress_line(Phase("verify", 10**9, 10**8, 60), Phase("verify", 10**9, 10**8, 30))
    'verify: 10%, 100.0 MB of 1.0 GB, 0 B/s'
    """
    # If the phase began after *before* was shown, its rate counts from its own start.
    is_same = before is not None and before.what == phase.what and before.seconds < phase.seconds
    done, seconds = (before.done, before.seconds) if before is not None and is_same else (0, 0.0)
    rate = (phase.done - done) / max(phase.seconds - seconds, 1e-3)
    amount = "{:,}".format if phase.what.startswith("records") else size
    parts = [
        *([f"{min(phase.done / phase.total, 1):.0%}"] if phase.total else []),
        f"{amount(phase.done)} of {amount(phase.total)}" if phase.total else amount(phase.done),
        f"{amount(round(rate))}/s",
        *([f"{_duration((phase.total - phase.done) / rate)} left"] if 0 < phase.done < phase.total and rate else []),
    ]
    return f"{phase.what}: {', '.join(parts)}"


def bar_line(phase: Phase, *, width: int) -> str:
    """
    Return a line for a terminal of *width* columns: the phase, a bar if there is room, and the content of a log's line.

    >>> bar_line(Phase("ingest", 10**9, 25 * 10**7, 60), width=80)
    'ingest [#####---------------] 25%, 250.0 MB of 1.0 GB, 4.2 MB/s, 3 min left'
    >>> bar_line(Phase("ingest", 10**9, 25 * 10**7, 60), width=60)
    'ingest: 25%, 250.0 MB of 1.0 GB, 4.2 MB/s, 3 min left'
    """
    text = progress_line(phase, None)
    room = width - len(text) - len("[] ")
    if not phase.total or room < _BAR_WIDTH_MIN:
        return text
    length = min(_BAR_WIDTH_MAX, room)
    filled = int(length * min(phase.done / phase.total, 1))
    return f"{phase.what} [{'#' * filled}{'-' * (length - filled)}] {text.removeprefix(f'{phase.what}: ')}"


def _duration(seconds: float) -> str:
    """
    Return *seconds*, rounded up, in the largest unit that gives at least 2.

    >>> _duration(0.2), _duration(90), _duration(150), _duration(9000)
    ('1 s', '90 s', '3 min', '3 h')
    """
    length, unit = next((scale for scale in _UNITS if seconds >= 2 * scale[0]), _UNITS[-1])
    return f"{-int(-seconds // length):,} {unit}"


@contextlib.contextmanager
def shown_progress(*, as_json: bool, every_seconds: float = LINE_SECONDS) -> Iterator["Progress"]:
    """Yield the object to which an operation reports its progress."""
    if as_json or output.is_quiet or sys.stderr is None or os.environ.get("LAYERSTORE_NO_PROGRESS"):
        from layerstore.progress import Silent

        yield Silent()
        return
    is_live = sys.stderr.isatty()
    lines, stop = Lines(is_live=is_live), threading.Event()
    pause = _DRAW_SECONDS if is_live else every_seconds
    speaker = threading.Thread(target=lines.speak, args=(stop, pause), daemon=True)
    with contextlib.suppress(RuntimeError, MemoryError):  # no memory for a thread: work without progress lines
        start(speaker)
    try:
        yield lines
    finally:
        stop.set()
        if speaker.ident is not None:
            speaker.join()
        with contextlib.suppress(OSError):  # nobody reads stderr now
            draw("")


@contextlib.contextmanager
def shown_steps(*, as_json: bool, every_seconds: float = LINE_SECONDS) -> Iterator[Callable[[str], None]]:
    """
    Yield a function that prints a line when a step begins, for work of unknown length.

    Until the next step, the elapsed seconds are shown: in place on a terminal, in a log by a line now and then.
    """
    if as_json or output.is_quiet or sys.stderr is None or os.environ.get("LAYERSTORE_NO_PROGRESS"):
        yield lambda _: None
        return
    is_live, stop, guard, began = sys.stderr.isatty(), threading.Event(), threading.Lock(), [time.monotonic()]

    def print_step(line: str) -> None:
        with guard:
            began[0] = time.monotonic()
            print_progress(line)

    def count() -> None:
        pause = 1.0 if is_live else every_seconds
        while not stop.wait(pause):
            with guard, contextlib.suppress(OSError):
                seconds = time.monotonic() - began[0]
                if seconds >= pause:
                    (draw if is_live else print_progress)(f"  … {seconds:.0f} s")

    counting = threading.Thread(target=count, daemon=True)
    with contextlib.suppress(RuntimeError, MemoryError):  # no memory for a thread: work without a clock
        start(counting)
    try:
        yield print_step
    finally:
        stop.set()
        if counting.ident is not None:
            counting.join()
        with contextlib.suppress(OSError):  # nobody reads stderr now
            draw("")
