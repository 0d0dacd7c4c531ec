"""``layerstore demo``: send a training run through a store, and show that it comes out the same."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson
from layerstore.cli.progress import shown_steps
from layerstore.cli.render import Column, counted, say, say_json, say_paragraph, say_table, shown
from layerstore.errors import LayerstoreError
from layerstore.json_fields import json_value
from layerstore.units import size

ABOUT = About("Before you start", store=None, answers=True)

_FACT_WIDTH = 13


def demo(
    *,
    folder: Annotated[
        Path,
        typer.Option("--dir", metavar="DIR", help="A new or empty folder, or a stopped demo's, for all that it makes."),
    ] = Path("layerstore-demo"),
    # A test checks both against the library's own numbers, since importing those here would slow down ``--help``.
    steps: Annotated[int, typer.Option(metavar="N", min=10, max=1000, help="How long to train.")] = 20,
    keep: Annotated[bool, typer.Option("--keep", help="Keep checkpoints and composites, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier demo left in DIR.")] = False,
    as_json: AsJson = False,
) -> None:
    """
    Train, save, resume and collect with DeepSpeed; compare losses.

    Trains a tiny Llama with ZeRO-3 on two CPU ranks; needs the extra `demo` and a C++ compiler.
    Shows what each policy saves, resumes from composites (also on a different number of ranks), removes old commits,
    and leaves a page for a browser.
    It takes about a minute and a half on two cores; the first time, DeepSpeed compiles for a minute or more before
    that.
    If you stop it, only DIR with its logs stays, and the same command begins anew.
    The exit code is 0 only if every loss after the resume, and all weights and moments, match the uninterrupted run,
    bit for bit.

    \b
    Examples:
      layerstore demo
      layerstore demo --dir /tmp/demo --steps 40 --keep
    """
    from layerstore.demo import run_demo

    try:
        with shown_steps(as_json=as_json) as say_step:
            facts = run_demo(folder, steps=steps, keep=keep, force=force, say=say_step)
    except LayerstoreError as exc:
        tail = exc.facts.get("tail")
        for line in tail if isinstance(tail, list) else []:
            print(f"  | {shown(line)}", file=sys.stderr)
        raise
    if as_json:
        say_json({name: json_value(value) for name, value in facts.items()})
    else:
        _say_facts(facts)
    if facts["problems"]:
        raise LayerstoreError(
            f"the demo found a difference: {'; '.join(facts['problems'])}",
            hint=f"the logs and the composites are in {facts['dir']}",
        )
    if not as_json:
        say_paragraph(
            f"All {len(facts['losses'])} losses after step {facts['resumed_from']} and all {len(facts['layers'])} "
            f"layers saved at step {facts['losses'][-1]['step']} are identical, bit for bit, to those of the "
            "uninterrupted run."
        )


def _say_facts(facts: dict[str, Any]) -> None:
    full = facts["saved"][0]
    say()
    say_paragraph(
        f"The same {full['saves']} saves of one training. The first is full whatever the policy; filter takes the "
        "first and the last of the six blocks always, and half of the rest at every fifth save."
    )
    say()
    say_table(
        [
            Column("SAVED BY"),
            Column(f"ALL {full['saves']}", "right"),
            Column("FIRST", "right"),
            Column("LATER, ON AVERAGE", "right"),
            Column("OF DEEPSPEED'S", "right"),
        ],
        (
            [
                saved["saved_by"] if saved is full else f"layerstore {saved['saved_by']}",
                size(saved["total_bytes"]),
                size(saved["first_bytes"]),
                size(round(saved["later_bytes"])),
                f"{saved['later_bytes'] / full['later_bytes']:.0%}",
            ]
            for saved in facts["saved"]
        ),
    )
    say()
    say(f"Resumed from step {facts['resumed_from']} in new processes:")
    say()
    columns = [Column("STEP", "right"), Column("LOSS UNINTERRUPTED"), Column("LOSS RESUMED"), Column("IDENTICAL")]
    rows = (
        [str(loss["step"]), repr(loss["uninterrupted"]), repr(loss["resumed"]), "yes" if loss["identical"] else "NO"]
        for loss in facts["losses"]
    )
    say_table(columns, rows)
    say()
    for name, text in _in_words(facts).items():
        say_paragraph(f"{name:<{_FACT_WIDTH}}{text}", indent=_FACT_WIDTH)
    say()


def _in_words(facts: dict[str, Any]) -> dict[str, str]:
    mixture, other, collected, last = facts["mixture"], facts["other_ranks"], facts["gc"], facts["losses"][-1]
    steps = ", ".join(f"{count} of step {step}" for step, count in mixture["steps"].items())
    seconds = ", ".join(f"{part} {spent:.1f} s" for part, spent in facts["seconds_by_part"].items())
    policy, layers = mixture["policy"], counted(mixture["layers"], "layer")
    return {
        "mixture": f"{policy} over the full saves, at step {mixture['step']}: {layers}, {steps}; {mixture['same']} of "
        f"{mixture['layers']} are those that saving by {policy} has left",
        "": f"resumed from it, the loss at step {last['step']} is {mixture['loss']:.4f}; uninterrupted it is "
        f"{last['uninterrupted']:.4f}",
        "other ranks": f"resumed on {counted(other['ranks'], 'rank')}, {other['same']} of {other['tensors']} masters "
        "and moments are identical",
        "gc": f"{counted(collected['removed'], 'commit')} removed, {collected['kept']} kept, the run "
        "by filter among them; the store had "
        f"{size(collected['before_bytes'])} and has {size(collected['after_bytes'])}, the pinned mixture in it; every "
        f"byte {'is as it was written' if collected['is_sound'] else 'was read: there is DAMAGE'}",
        "time": f"{facts['seconds']:.1f} s: {seconds}",
        "report": f"{shown(str(facts['report']))}, a page for a browser",
        "look": f"layerstore log --store {shown(shlex.quote(str(facts['store'])))}",
    }
