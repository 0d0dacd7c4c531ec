"""``layerstore demo``: a training run goes through a store, and comes out the same."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson
from layerstore.cli.render import Column, counted, is_quiet, say, say_json, say_paragraph, say_table, shown, size
from layerstore.errors import LayerstoreError
from layerstore.json_fields import json_fields

if TYPE_CHECKING:
    from layerstore.live.demo import Audience, DemoResult

_FACT_WIDTH = 13


def demo(
    *,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="A new or empty folder for all that the demo makes.")
    ] = Path("layerstore-demo"),
    # Both checked against the library's own numbers by a test: importing that here would slow down ``--help``.
    steps: Annotated[int, typer.Option(metavar="N", min=10, max=1000, help="How long to train.")] = 20,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoints and composites, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier demo left in DIR.")] = False,
    as_json: AsJson = False,
) -> None:
    """
    Train, save, resume and collect with DeepSpeed; compare losses.

    Trains a tiny Llama with ZeRO-3 on two CPU ranks; needs the extra `demo` and a C++ compiler.
    Shows what each policy saves, resumes from composites, on another number of ranks, too, removes old commits,
    and leaves a page for a browser.
    It takes about a minute and a half on two cores; the first time DeepSpeed compiles for a minute or more before that.
    The exit code is 0 only if every loss after the resume, and all weights and moments, are the uninterrupted run's,
    bit for bit.

    \b
    Examples:
      layerstore demo
      layerstore demo --dir /tmp/demo --steps 40 --keep
    """
    from layerstore.live.demo import run_demo

    try:
        result = run_demo(folder, steps=steps, keep=keep, force=force, audience=_audience(as_json=as_json))
    except LayerstoreError as exc:
        tail = exc.facts.get("tail")
        for line in tail if isinstance(tail, list) else []:
            print(f"  | {shown(line)}", file=sys.stderr)
        raise
    if as_json:
        say_json(_fields(result))
    else:
        _say_result(result)
    if result.problems:
        raise LayerstoreError(
            f"the demo found a difference: {'; '.join(result.problems)}",
            hint=f"the logs and the composites are in {result.folder}",
        )
    if not as_json:
        say_paragraph(_verdict(result))


def _audience(*, as_json: bool) -> "Audience":
    """Return who shows the demo's progress on stderr; programs, and who asked for quiet, are shown none."""
    from layerstore.live.demo import Audience

    moves = sys.stderr.isatty() and not os.environ.get("LAYERSTORE_NO_PROGRESS")

    class Lines(Audience):
        """A line for each event; on a terminal the steps share one."""

        def phase(self, text: str) -> None:
            self._say(text)

        def note(self, text: str) -> None:
            self._say(f"  {text}")

        def step(self, step: int, *, steps: int, loss: float) -> None:
            self._say(f"  step {step} of {steps}, loss {loss:.4f}", end="" if moves and step < steps else "\n")

        def _say(self, text: str, *, end: str = "\n") -> None:
            start = "\r" if moves else ""
            print(f"{start}{shown(text)}", end=end, file=sys.stderr, flush=True)

    return Audience() if as_json or is_quiet() else Lines()


def _say_result(result: "DemoResult") -> None:
    full = result.saved[0]
    say()
    say_paragraph(
        f"The same {full.saves} saves of one training. The first is full whatever the policy; filter takes the first "
        "and the last of the six blocks always, and half of the rest at every fifth save."
    )
    say()
    say_table(
        [
            Column("SAVED BY"),
            Column(f"ALL {full.saves}", "right"),
            Column("FIRST", "right"),
            Column("LATER, ON AVERAGE", "right"),
            Column("OF DEEPSPEED'S", "right"),
        ],
        (
            [
                saved.saved_by if saved is full else f"layerstore {saved.saved_by}",
                size(saved.total_bytes),
                size(saved.first_bytes),
                size(round(saved.later_bytes)),
                f"{saved.later_bytes / full.later_bytes:.0%}",
            ]
            for saved in result.saved
        ),
    )
    say()
    say(f"Resumed from step {result.resumed_from} in new processes:")
    say()
    columns = [Column("STEP", "right"), Column("LOSS UNINTERRUPTED"), Column("LOSS RESUMED"), Column("IDENTICAL")]
    rows = (
        [str(loss.step), repr(loss.uninterrupted), repr(loss.resumed), "yes" if loss.identical else "NO"]
        for loss in result.losses
    )
    say_table(columns, rows)
    say()
    for name, text in _facts(result).items():
        say_paragraph(f"{name:<{_FACT_WIDTH}}{text}", indent=_FACT_WIDTH)
    say()


def _facts(result: "DemoResult") -> dict[str, str]:
    mixture, other, collected = result.mixture, result.resized, result.collected
    steps = ", ".join(f"{count} of step {step}" for step, count in mixture.steps.items())
    seconds = ", ".join(f"{part} {spent:.1f} s" for part, spent in result.seconds.items() if part != "total")
    return {
        "mixture": f"{mixture.policy} over the full saves, at step {mixture.step}: {counted(mixture.layers, 'layer')}, "
        f"{steps}; {mixture.same} of {mixture.layers} are those that saving by {mixture.policy} has left",
        "": f"resumed from it, the loss at step {result.losses[-1].step} is {result.mixture_loss:.4f}; uninterrupted "
        f"it is {result.losses[-1].uninterrupted:.4f}",
        "other ranks": f"resumed on {counted(other.ranks, 'rank')}, {other.same} of {other.tensors} masters and "
        "moments are identical",
        "gc": f"{counted(collected.removed, 'commit')} removed, {collected.kept} kept; the store had "
        f"{size(collected.before_bytes)} and has {size(collected.after_bytes)}, the pinned mixture in it; every byte "
        f"{'is as it was written' if collected.is_sound else 'was read: there is DAMAGE'}",
        "time": f"{result.seconds['total']:.1f} s: {seconds}",
        "report": f"{shown(str(result.report))}, a page for a browser",
        "look": f"layerstore log --store {shown(shlex.quote(str(result.store)))}",
    }


def _verdict(result: "DemoResult") -> str:
    return (
        f"All {len(result.losses)} losses after step {result.resumed_from} and all {len(result.layers)} layers saved "
        f"at step {result.losses[-1].step} are identical, bit for bit, to those of the uninterrupted run."
    )


def _fields(result: "DemoResult") -> dict[str, object]:
    return {
        **json_fields(result),
        "mixture": json_fields(result.mixture) | {"loss": result.mixture_loss},
        "seconds": result.seconds["total"],
        "seconds_by_part": {part: spent for part, spent in result.seconds.items() if part != "total"},
    }
