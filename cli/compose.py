"""``layerstore compose``: a ZeRO-3 checkpoint from stored layers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, Reference, StorePath, chosen_reference, opened
from layerstore.cli.policy import Aux, Every, First, Fresh, Last, Share, described_policy
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
        typer.Option(
            metavar="P", help="latest, exact, parity, filter, or an installed one: which save each layer is from."
        ),
    ] = "latest",
    fresh: Fresh = None,
    first: First = None,
    last: Last = None,
    share: Share = None,
    every: Every = None,
    aux: Aux = None,
    max_staleness: Annotated[
        int | None,
        typer.Option(
            "--max-staleness", metavar="N", min=0, help="Refuse layers more than N steps older than the base."
        ),
    ] = None,
    pin: Annotated[
        str | None, typer.Option("--pin", metavar="NAME", help="Keep the composite under this name, written or not.")
    ] = None,
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

    The policy says which save each layer comes from; all else comes from the commit REF.
    latest: each layer as the commit has it. exact: every layer from this very step.
    parity: half of the layers from REF, the other half from the save before.
    filter: the ends of the model and the norms from REF, the rest from when its turn was.
    DIR appears whole or not at all.

    \b
    Examples:
      layerstore compose sft@200 -o resume
      layerstore compose sft@200 --policy parity --fresh even --dry-run
      layerstore compose sft --policy filter --every 2 --pin best -o resume
      layerstore compose best --policy exact -o resume --force
    """
    from layerstore.errors import InvalidInput
    from layerstore.policy import EXACT

    if out is None and not dry_run and pin is None:
        raise InvalidInput(
            "compose does not know where to write", hint="name a folder with -o DIR, or pass --pin NAME or --dry-run"
        )
    settings = {"fresh": fresh, "first": first, "last": last, "share": share, "every": every, "aux": aux}
    with opened(store) as opened_store:
        chosen = policy if policy == EXACT and not any(settings.values()) else described_policy(policy, settings)
        composite = opened_store.compose(chosen_reference(opened_store, ref=ref, run=run, step=step), policy=chosen)
        composite.check(max_staleness=max_staleness)
        if pin is not None and not dry_run:
            composite.pin(pin)
        if out is None or dry_run:
            _say_plan(composite, out, pin=pin, is_dry_run=dry_run, as_json=as_json)
            return
        with shown_progress(as_json=as_json) as progress:
            written = composite.write(out, verify=not no_verify, force=force, progress=progress)
    if as_json:
        say_json(_fields(composite, out=written.out, bytes_written=written.bytes_written, seconds=written.seconds))
    else:
        _say_written(composite, written)


def _say_plan(composite: "Composite", out: Path | None, *, pin: str | None, is_dry_run: bool, as_json: bool) -> None:
    if as_json:
        say_json({**_fields(composite, out=out, bytes_written=0, seconds=0.0), "pin": pin, "dry_run": is_dry_run})
        return
    lines = composite.ls()
    columns = [
        Column("LAYER", folds=True),
        Column("FROM", folds=True),
        Column("STEPS BEHIND", "right"),
        Column("SAVES BEHIND", "right"),
        Column("SIZE", "right"),
    ]
    sizes = [sum(line.bytes_by_kind.values()) for line in lines]
    rows = (
        [age.layer, f"{age.run}@{age.step}", _behind(age.steps), _behind(age.saves), size(of_line)]
        for age, of_line in zip(composite.staleness.layers, sizes, strict=True)
    )
    say_table(columns, rows, total=["total", "", "", "", size(sum(sizes))])
    say()
    _say_mixture(composite)
    ranks = counted(composite.world_size, "rank")
    outcome = "nothing was written" if is_dry_run or pin is None else f"kept as pin {shown(pin)}"
    say(f"base {shown(composite.run)}@{composite.step}, policy {composite.policy}, {ranks}; {outcome}")


def _behind(count: int | None) -> str:
    return "?" if count is None else str(count)


def _say_mixture(composite: "Composite") -> None:
    """Say how old the oldest layer is, and what else of the mixture a reader should know."""
    staleness = composite.staleness
    if staleness.is_mixed:
        oldest = staleness.oldest
        age = "of another run" if oldest.steps is None else f"{counted(oldest.steps, 'step')} behind the base"
        say(f"oldest layer: {shown(oldest.layer)} from {shown(oldest.run)}@{oldest.step}, {age}")
    if len(staleness.optimizer_steps) > 1:
        counts = ", ".join(f"{step} ({counted(of, 'layer')})" for step, of in staleness.optimizer_steps.items())
        say(f"the optimizer had counted {counts} updates; the base's count is written for all")
    if composite.older_than_due:
        first = composite.older_than_due[0]
        say(
            f"{counted(len(composite.older_than_due), 'layer')} had not been written when due "
            f"(first: {shown(first)}): the version before stands in"
        )


def _say_written(composite: "Composite", written: "Written") -> None:
    say(
        f"wrote {shown(written.out)}: {shown(written.run)}@{written.step}, policy {written.policy}, "
        f"{counted(len(composite.layers), 'layer')}, {counted(written.world_size, 'rank')}, "
        f"{size(written.bytes_written)} in {written.seconds:.1f} s"
    )
    _say_mixture(composite)
    ranks = counted(written.world_size, "rank")
    say(f"resume with {ranks}: engine.load_checkpoint(FOLDER), or train(resume_from_checkpoint=FOLDER) of a Trainer")


def _fields(composite: "Composite", *, out: Path | None, bytes_written: int, seconds: float) -> dict[str, object]:
    return {
        **composite.summary(),
        "world_size": composite.world_size,
        "out": None if out is None else str(out),
        "bytes_written": bytes_written,
        "seconds": seconds,
    }
