"""``layerstore demo``: send a training run through a store, and show that it comes out the same."""

from pathlib import Path
from typing import Annotated, Any

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson
from layerstore.cli.progress import shown_steps
from layerstore.cli.render import (
    Column,
    print_facts,
    print_json,
    print_line,
    print_note,
    print_paragraph,
    print_rows,
    shown,
)
from layerstore.errors import LayerstoreError
from layerstore.json_fields import json_value
from layerstore.layers import typed
from layerstore.units import size

ABOUT = About("Before you start", store=None, answers=True)

DemoFolder = Annotated[Path, typer.Option("--dir", metavar="DIR", help="A new folder for all that the demo writes.")]


def demo(*, folder: DemoFolder = Path("layerstore-demo"), as_json: AsJson = False) -> None:
    """
    Train, save, resume and collect with DeepSpeed; compare losses.

    Trains a tiny Llama with ZeRO-3 on two CPU ranks; needs the extra `demo` and a C++ compiler.
    Shows what each policy saves, resumes from composites (one on one rank), removes old commits, writes a report.
    It takes about a minute and a half on two cores; the first time, DeepSpeed compiles for a minute or more.
    The exit code is 0 only if every later loss, weight and moment matches the uninterrupted run, bit for bit.

    \b
    Examples:
      layerstore demo --dir /tmp/demo
    """
    from layerstore.demo import run_demo

    with shown_steps(as_json=as_json) as report_step:
        facts = run_demo(folder, report=report_step)
    if as_json:
        print_json({name: json_value(value) for name, value in facts.items()})
    else:
        _print_facts(facts)
    if facts["problems"]:
        raise LayerstoreError(f"the demo found a difference: {'; '.join(facts['problems'])}", hint=f"see {folder}")
    if not as_json:
        steps = f"after step {facts['resumed_from']}, and all layers at step {facts['losses'][-1]['step']}"
        print_paragraph(f"All losses {steps}, are identical, bit for bit, to those of the uninterrupted run.")
        print_note(f"next: layerstore --store {shown(typed(str(folder / 'store')))} log")


def _print_facts(facts: dict[str, Any]) -> None:
    usage = {
        Column("SAVED BY"): lambda row: row["saved_by"],
        Column(f"ALL {facts['saved'][0]['saves']}", "right"): lambda row: size(row["total_bytes"]),
        Column("LATER, ON AVERAGE", "right"): lambda row: size(round(row["later_bytes"])),
        Column("OF DEEPSPEED'S", "right"): lambda row: f"{row['later_bytes'] / facts['saved'][0]['later_bytes']:.0%}",
    }
    losses = {
        Column("STEP", "right"): lambda loss: str(loss["step"]),
        Column("LOSS UNINTERRUPTED"): lambda loss: repr(loss["uninterrupted"]),
        Column("LOSS RESUMED"): lambda loss: repr(loss["resumed"]),
        Column("IDENTICAL"): lambda loss: "yes" if loss["identical"] else "NO",
    }
    mixture, other, gc = facts["mixture"], facts["other_ranks"], facts["gc"]
    in_words = {
        "mixture": f"from steps {', '.join(map(str, mixture['steps']))}; loss after resuming: {mixture['loss']:.4f}",
        "other ranks": f"on 1 rank, {other['same']} of {other['tensors']} masters and moments are identical",
        "gc": f"{gc['removed']} commits removed: {size(gc['before_bytes'])} before, {size(gc['after_bytes'])} after",
        "report": f"{facts['report']}; the store is next to it",
    }
    print_line()
    print_rows(usage, facts["saved"])
    print_line()
    print_rows(losses, facts["losses"])
    print_line()
    print_facts(in_words)
    print_line()
