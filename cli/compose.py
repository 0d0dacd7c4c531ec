"""``layerstore compose``: a ZeRO-3 checkpoint, or a folder for Transformers, from stored layers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layerstore.cli.compose_hf import ExportOptions, export, is_export
from layerstore.cli.mixture import PlanOptions, composite_fields, say_mixture, say_notes, say_plan, say_step
from layerstore.cli.options import AsJson, Reference, StorePath, chosen_reference, opened
from layerstore.cli.policy import (
    Aux,
    Budget,
    Every,
    First,
    Fresh,
    Last,
    Settings,
    Share,
    Stalest,
    Threshold,
    described_policy,
)
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, say_json, say_paragraph, shown, size

if TYPE_CHECKING:
    from layerstore import Composite, Store
    from layerstore.ops.compose import Written

PolicyName = Annotated[
    str | None,
    typer.Option(
        metavar="P", help="latest (else), exact, parity, filter, drift, or an installed one: where layers are from."
    ),
]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", metavar="F", help="A file that says where each layer is from.")
]
MaxStaleness = Annotated[
    int | None,
    typer.Option("--max-staleness", metavar="N", min=0, help="Refuse layers more than N steps older than the base."),
]
PinName = Annotated[
    str | None, typer.Option("--pin", metavar="NAME", help="Keep the composite under this name, written or not.")
]
RunName = Annotated[str | None, typer.Option(metavar="R", help="The run, instead of REF.")]
Step = Annotated[int | None, typer.Option(metavar="STEP", min=0, help="The step, instead of REF.")]
WorldSize = Annotated[
    int | None,
    typer.Option(metavar="W", min=1, help="For W ranks; by default as many as the base has.", show_default=False),
]
AdamStep = Annotated[
    Literal["unify", "per-layer"] | None,
    typer.Option(
        metavar="unify|per-layer", help="The optimizer's step counters: the base's (unify, else), or each layer's own."
    ),
]
Format = Annotated[
    str,
    typer.Option("--format", metavar="zero3|hf", help="zero3: shards to resume from; hf: weights for from_pretrained."),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="bf16|fp16|fp32", help="With hf: the element type; else as trained.", show_default=False),
]
MaxShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="With hf: the largest file, such as 2GiB; else 5GB.")
]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not check what is read; sizes only.")]
Force = Annotated[bool, typer.Option("--force", help="Replace DIR if it is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write.", show_default=False)]


def compose(
    ref: Reference = None,
    *,
    policy: PolicyName = None,
    recipe: RecipeFile = None,
    fresh: Fresh = None,
    first: First = None,
    last: Last = None,
    share: Share = None,
    every: Every = None,
    aux: Aux = None,
    threshold: Threshold = None,
    budget: Budget = None,
    stalest: Stalest = None,
    max_staleness: MaxStaleness = None,
    pin: PinName = None,
    run: RunName = None,
    step: Step = None,
    form: Format = "zero3",
    world_size: WorldSize = None,
    adam_step: AdamStep = None,
    dtype: Dtype = None,
    max_shard_size: MaxShardSize = None,
    no_verify: NoVerify = False,
    force: Force = False,
    dry_run: DryRun = False,
    out: Out = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write a checkpoint to resume from, or weights for Transformers.

    The policy or recipe says which save each layer comes from; all else comes from the commit REF.
    latest: each layer as the commit has it. exact: every layer from this very step.
    parity: half of the layers from REF, the other half from the save before.
    filter: the ends of the model and the norms from REF, the rest from when its turn was.
    DIR appears whole or not at all.

    \b
    Examples:
      layerstore compose sft@200 --policy parity --world-size 16 -o resume
      layerstore compose --recipe mix.yaml --pin mix --dry-run
      layerstore compose best --format hf --dtype bf16 -o model
    """
    options = ExportOptions(dtype=dtype, max_shard_size=max_shard_size)
    is_hf = is_export(form, options, only_shards={"--world-size": world_size, "--adam-step": adam_step})
    _check_purpose(out, pin, dry_run=dry_run)
    settings = Settings(fresh, first, last, share, every, aux, threshold, budget, stalest)
    with opened(store) as opened_store:
        if recipe is not None:
            composite = _by_recipe(opened_store, recipe, settings, run=run, others=(ref, step, policy))
        else:
            reference = chosen_reference(opened_store, ref=ref, run=run, step=step)
            composite = _by_policy(opened_store, reference, policy or "latest", settings)
        composite.check(max_staleness=max_staleness)
        asked = PlanOptions(out, pin, dry_run, world_size, adam_step or "unify")
        _carry_out(composite, asked, options if is_hf else None, verify=not no_verify, force=force, as_json=as_json)


def _carry_out(
    composite: "Composite",
    asked: PlanOptions,
    as_export: ExportOptions | None,
    *,
    verify: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Write the composite, or say what it would be; pin it, but only once nothing can be refused any more."""
    if asked.out is None and not asked.is_dry_run:
        _pin_if_asked(composite, asked.pin)
    if as_export is not None:
        export(composite, asked, as_export, verify=verify, force=force, as_json=as_json)
    elif asked.out is None or asked.is_dry_run:
        say_plan(composite, asked, as_json=as_json)
    else:
        with shown_progress(as_json=as_json) as progress:
            written = composite.write(
                asked.out,
                world_size=asked.world_size,
                adam_step=asked.adam_step,
                verify=verify,
                force=force,
                progress=progress,
            )
        _say_written(composite, written, asked.adam_step, as_json=as_json)
    if asked.out is not None and not asked.is_dry_run:
        _pin_if_asked(composite, asked.pin)


def _pin_if_asked(composite: "Composite", pin: str | None) -> None:
    if pin is not None:
        composite.pin(pin)


def _check_purpose(out: Path | None, pin: str | None, *, dry_run: bool) -> None:
    from layerstore.errors import InvalidInput

    if out is None and not dry_run and pin is None:
        raise InvalidInput(
            "compose does not know where to write", hint="name a folder with -o DIR, or pass --pin NAME or --dry-run"
        )


def _by_policy(store: "Store", reference: str | None, policy: str, settings: Settings) -> "Composite":
    from layerstore.policy import EXACT

    is_exact = policy == EXACT and not settings.given
    return store.compose(reference, policy=policy if is_exact else described_policy(policy, settings))


def _by_recipe(
    store: "Store", recipe: Path, settings: Settings, *, run: str | None, others: tuple[object, object, object]
) -> "Composite":
    from layerstore.errors import InvalidInput

    others_by_name = dict(zip(("REF", "--step", "--policy"), others, strict=True))
    others_by_name |= {f"--{name}": value for name, value in settings.given.items()}
    for name, value in others_by_name.items():
        if value is not None:
            raise InvalidInput(f"--recipe and {name} were both given", hint="the recipe names its base and its layers")
    composite = store.compose(recipe=recipe, run=run)
    say_notes(composite.recipe_notes)
    return composite


def _say_written(
    composite: "Composite", written: "Written", adam_step: Literal["unify", "per-layer"], *, as_json: bool
) -> None:
    say_notes(written.notes)
    if as_json:
        say_json(
            {
                **composite_fields(composite, written.notes),
                "world_size": written.world_size,
                "out": str(written.out),
                "bytes_written": written.bytes_written,
                "seconds": written.seconds,
            }
        )
        return
    say_paragraph(
        f"wrote {shown(written.out)}: {shown(composite.name)}, policy {written.policy}, "
        f"{counted(len(composite.layers), 'layer')}, {counted(written.world_size, 'rank')}, "
        f"{size(written.bytes_written)} in {written.seconds:.1f} s",
        indent=2,
    )
    say_mixture(composite)
    say_step(composite, adam_step)
    ranks = counted(written.world_size, "rank")
    how = "engine.load_checkpoint(FOLDER), or train(resume_from_checkpoint=FOLDER) of a Trainer"
    say_paragraph(f"resume with {ranks}: {how}", indent=2)
