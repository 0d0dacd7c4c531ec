"""The progress of the demo on stderr: on a terminal with a line that moves, elsewhere in plain lines."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerstore.cli.render import is_quiet, shown
from layerstore.live.demo import Audience

if TYPE_CHECKING:
    from rich.progress import Progress as Live
    from rich.progress import TaskID


class QuietAudience(Audience):
    """For programs and ``--quiet``: shows only what went wrong."""

    def complain(self, line: str) -> None:
        """Show a line of a failed training's log."""
        print(f"  | {shown(line)}", file=sys.stderr)


class _Lines(QuietAudience):
    """For logs and pipes: a line for each event."""

    def phase(self, text: str) -> None:
        print(shown(text), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(f"  {shown(text)}", file=sys.stderr, flush=True)

    def step(self, step: int, *, steps: int, loss: float) -> None:
        self.note(_step_line(step, steps, loss))


class _Terminal(QuietAudience):
    """For terminals: finished parts stay, the current step moves below them."""

    def __init__(self, live: "Live", task: "TaskID") -> None:
        self._live = live
        self._task = task

    def phase(self, text: str) -> None:
        self._live.reset(self._task, description="", total=None)
        self._live.console.print(shown(text), style="bold")

    def note(self, text: str) -> None:
        self._live.console.print(f"  {shown(text)}")

    def step(self, step: int, *, steps: int, loss: float) -> None:
        self._live.update(self._task, completed=step, total=steps, description=_step_line(step, steps, loss))

    def complain(self, line: str) -> None:
        self._live.console.print(f"  | {shown(line)}", style="dim")


def _step_line(step: int, steps: int, loss: float) -> str:
    return f"step {step} of {steps}, loss {loss:.4f}"


@contextlib.contextmanager
def shown_demo(*, as_json: bool) -> Iterator[QuietAudience]:
    """Yield the audience that shows the demo's progress."""
    if as_json or is_quiet():
        yield QuietAudience()
    elif not sys.stderr.isatty() or os.environ.get("LAYERSTORE_NO_PROGRESS"):
        yield _Lines()
    else:
        with _live() as live:
            yield _Terminal(live, live.add_task("", total=None))


def _live() -> "Live":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn(" "),
        SpinnerColumn(),
        TimeElapsedColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True, highlight=False, markup=False, emoji=False),
        transient=True,
    )
