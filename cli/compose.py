"""``layerstore compose``: a ZeRO-3 checkpoint from stored layers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, Reference, StorePath, chosen_reference, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import Column, counted, say, say_json, say_table, shown, size

if TYPE_CHECKING:
    from layerstore import Composite
    from layerstore.ops.compose import Written


def compose(
    ref: Reference = None,
    *,
    policy: Annotated[
        str,
        typer.Option(metavar="P", help="latest: each layer's newest version; exact: every layer from this very step."),
    ] = "latest",
    run: Annotated[str | None, typer.Option(metavar="R", help="The run, instead of REF.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="The step, instead of REF.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Do not check what is read; sizes only.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write.", show_default=False)
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write a ZeRO-3 checkpoint to resume from.

    DIR appears whole or not at all.

    \b
    Examples:
      layerstore compose sft@200 -o resume
      layerstore compose --run sft --step 200 --dry-run
      layerstore compose best --policy exact -o resume --force
    """
    from layerstore.errors import InvalidInput

    if out is None and not dry_run:
        raise InvalidInput("compose does not know where to write", hint="name a folder with -o DIR, or pass --dry-run")
    with opened(store) as opened_store:
        composite = opened_store.compose(chosen_reference(opened_store, ref=ref, run=run, step=step), policy=policy)
        if out is None or dry_run:
            _say_plan(composite, out, as_json=as_json)
            return
        with shown_progress(as_json=as_json) as progress:
            written = composite.write(out, verify=not no_verify, force=force, progress=progress)
    if as_json:
        say_json(_fields(composite, out=written.out, bytes_written=written.bytes_written, seconds=written.seconds))
    else:
        _say_written(composite, written)


def _say_plan(composite: "Composite", out: Path | None, *, as_json: bool) -> None:
    if as_json:
        say_json({**_fields(composite, out=out, bytes_written=0, seconds=0.0), "dry_run": True})
        return
    lines = composite.ls()
    columns = [Column("LAYER", folds=True), Column("FROM", folds=True), Column("SIZE", "right")]
    sizes = [sum(line.bytes_by_kind.values()) for line in lines]
    rows = ([line.layer, f"{line.run}@{line.step}", size(of_line)] for line, of_line in zip(lines, sizes, strict=True))
    say_table(columns, rows, total=["total", "", size(sum(sizes))])
    say()
    ranks = counted(composite.world_size, "rank")
    say(f"base {shown(composite.run)}@{composite.step}, policy {composite.policy}, {ranks}; nothing was written")


def _say_written(composite: "Composite", written: "Written") -> None:
    say(
        f"wrote {shown(written.out)}: {shown(written.run)}@{written.step}, policy {written.policy}, "
        f"{counted(len(composite.layers), 'layer')}, {counted(written.world_size, 'rank')}, "
        f"{size(written.bytes_written)} in {written.seconds:.1f} s"
    )
    ranks = counted(written.world_size, "rank")
    say(f"resume with {ranks}: engine.load_checkpoint(FOLDER), or train(resume_from_checkpoint=FOLDER) of a Trainer")


def _fields(composite: "Composite", *, out: Path | None, bytes_written: int, seconds: float) -> dict[str, object]:
    return {
        "run": composite.run,
        "step": composite.step,
        "policy": composite.policy,
        "world_size": composite.world_size,
        "out": None if out is None else str(out),
        "layers": {layer: {"run": choice.run, "step": choice.step} for layer, choice in composite.layers.items()},
        "bytes_written": bytes_written,
        "seconds": seconds,
    }
