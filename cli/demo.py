"""``layerstore demo``: a training run goes through a store, and comes out the same."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.demo_progress import shown_demo
from layerstore.cli.options import AsJson
from layerstore.cli.render import Column, say, say_json, say_table, shown, size

if TYPE_CHECKING:
    from layerstore.live.demo import DemoResult


def demo(
    *,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="A new or empty folder for all that the demo makes.")
    ] = Path("layerstore-demo"),
    # Both checked against the library's own numbers by a test: importing that here would slow down ``--help``.
    steps: Annotated[int, typer.Option(metavar="N", min=4, max=1000, help="How long to train.")] = 20,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints and the composite, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what an earlier demo left in DIR.")] = False,
    as_json: AsJson = False,
) -> None:
    """
    Train, save, ingest, compose and resume with real DeepSpeed, and compare every loss.

    Trains a tiny Llama with ZeRO-3 on two CPU ranks; needs the extra `demo` and a C++ compiler.
    Takes a minute; the first time, while DeepSpeed compiles its operator, two.
    The exit code is 0 only if every loss after the resume, and all weights and moments at the end, are the
    uninterrupted run's, bit for bit.

    \b
    Examples:
      layerstore demo
      layerstore demo --dir /tmp/demo --steps 40 --keep
    """
    from layerstore.errors import LayerstoreError
    from layerstore.live.demo import run_demo

    with shown_demo(as_json=as_json) as audience:
        try:
            result = run_demo(folder, steps=steps, keep=keep, force=force, audience=audience)
        except LayerstoreError as exc:
            tail = exc.facts.get("tail")
            for line in tail if isinstance(tail, list) else []:
                audience.complain(line)
            raise
    if as_json:
        say_json(_fields(result))
    else:
        _say_result(result)
    if not result.identical:
        losses = sum(not loss.identical for loss in result.losses)
        layers = sum(not is_same for is_same in result.layers.values())
        raise LayerstoreError(
            f"{losses} of {len(result.losses)} losses and {layers} of {len(result.layers)} layers after the resume "
            "are not the uninterrupted run's",
            hint=f"the logs and the composite are in {result.folder}",
        )
    if not as_json:
        say(_verdict(result))


def _say_result(result: "DemoResult") -> None:
    columns = [Column("STEP", "right"), Column("LOSS UNINTERRUPTED"), Column("LOSS RESUMED"), Column("IDENTICAL")]
    rows = (
        [str(loss.step), repr(loss.uninterrupted), repr(loss.resumed), "yes" if loss.identical else "NO"]
        for loss in result.losses
    )
    say_table(columns, rows)
    say()
    sizes, seconds = result.sizes, result.seconds
    say(
        f"{size(sizes['checkpoints'])} of checkpoints in {size(sizes['store'])} of store; "
        f"composite {size(sizes['composite'])}"
    )
    parts = ", ".join(f"{part} {spent:.1f} s" for part, spent in seconds.items() if part != "total")
    say(f"took {seconds['total']:.1f} s: {parts}")
    say(f"look at the store: layerstore log --store {shown(result.store)}")
    say()


def _verdict(result: "DemoResult") -> str:
    return (
        f"All {len(result.losses)} losses after step {result.resumed_from} and all {len(result.layers)} layers saved "
        f"at step {result.losses[-1].step} are identical, bit for bit, to those of the uninterrupted run."
    )


def _fields(result: "DemoResult") -> dict[str, object]:
    return {
        "identical": result.identical,
        "resumed_from": result.resumed_from,
        "losses": [
            {
                "step": loss.step,
                "uninterrupted": loss.uninterrupted,
                "resumed": loss.resumed,
                "identical": loss.identical,
            }
            for loss in result.losses
        ],
        "layers": result.layers,
        "seconds": result.seconds["total"],
        "seconds_by_part": {part: spent for part, spent in result.seconds.items() if part != "total"},
        "sizes": result.sizes,
        "dir": str(result.folder),
        "store": str(result.store),
    }
