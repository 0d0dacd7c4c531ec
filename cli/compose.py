"""``layerstore compose``: a ZeRO checkpoint, or a folder for another library, from stored layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import (
    AsJson,
    OptionTable,
    ReferenceArgument,
    StorePath,
    chosen_reference,
    opened,
    option_row,
    with_options,
)
from layerstore.cli.policy import policy_choices, with_settings
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import (
    Column,
    counted,
    print_json,
    print_line,
    print_paragraph,
    print_table,
    print_warning,
    shown,
)
from layerstore.errors import InvalidInput
from layerstore.formats import FORMATS, Delta, chosen_format
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.setting import settings_of
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore import Composite, Store
    from layerstore.assemble import Exported
    from layerstore.delta import DeltaWritten
    from layerstore.formats import Format, Plan
    from layerstore.policy import Policy

ABOUT = About("Restore", store="anywhere", elsewhere=("export", "extract", "get", "load", "merge", "restore", "resume"))

# The headings of options in the command's help.
_SOURCE, _OUTPUT, _SAFETY = "Source", "Output", "Safety"

PolicyName = Annotated[
    str | None,
    typer.Option(
        metavar="P",
        help=f"{'; '.join(f'{name}: {text}' for name, text in policy_choices().items())}. [default: latest]",
        rich_help_panel=_SOURCE,
    ),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="F", help="A file that says where layers come from.", rich_help_panel=_SOURCE),
]
MaxStaleness = Annotated[
    int | None,
    typer.Option(
        "--max-staleness",
        metavar="N",
        min=0,
        help="Refuse layers more than N steps older than the base.",
        rich_help_panel=_SAFETY,
    ),
]
PinName = Annotated[
    str | None,
    typer.Option(
        "--pin", metavar="NAME", help="Keep the composite under this name, even without -o.", rich_help_panel=_OUTPUT
    ),
]
RunName = Annotated[str | None, typer.Option(metavar="R", help="The run, instead of REF.", rich_help_panel=_SOURCE)]
StepOption = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="The step, instead of REF.", rich_help_panel=_SOURCE)
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Instead of REF, take the newest save up to REF that was kept bit for bit.",
        rich_help_panel=_SOURCE,
    ),
]
WithoutDamaged = Annotated[
    bool,
    typer.Option(
        "--without-damaged",
        help="Read everything first; use older versions of damaged layers.",
        rich_help_panel=_SAFETY,
    ),
]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Check only sizes, not the bytes that are read.", rich_help_panel=_SAFETY)
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Replace DIR, if layerstore wrote it.", rich_help_panel=_SAFETY)
]
ForceForeign = Annotated[
    bool,
    typer.Option(
        "--force-foreign",
        help="Replace DIR, even a checkpoint or export that something else wrote.",
        rich_help_panel=_SAFETY,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel=_SAFETY)]
_AVERAGE: OptionTable = {
    "mean": (str, "SAVES", "Average the masters of these saves: last:10, or weighted: sft@800,sft@900:2."),
    "ema": (float, "B", "Weight the last saves: each counts B times as much as the next."),
    "mean_layers": (str, "PATTERN", "Average only these layers; the others come from REF."),
}


def _format_options() -> OptionTable:
    """Return the option that chooses the format, and the options of all formats."""
    names = tuple(known.name for known in FORMATS)
    what = "; ".join(f"{known.name}: {known.about}" for known in FORMATS) + ". [default: shards; dcp if dcp saved REF]"
    table: dict[str, tuple[Any, str, str]] = {"format": (Literal[names], "|".join(names), what)}
    for name in dict.fromkeys(name for known in FORMATS for name in settings_of(known)):
        having = {known.name: settings_of(known)[name] for known in FORMATS if name in settings_of(known)}
        setting = next(iter(having.values()))
        table[name] = option_row(setting, f"{', '.join(having)}: {setting.help}")
    return table


Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write.", rich_help_panel=_OUTPUT)
]


@with_settings
@with_options("average", _AVERAGE, panel="Average")
@with_options("options", _format_options(), panel=_OUTPUT)
def compose(
    ref: ReferenceArgument = None,
    *,
    out: Out = None,
    options: Mapping[str, Any],
    pin: PinName = None,
    run: RunName = None,
    step: StepOption = None,
    exact: Exact = False,
    policy: PolicyName = None,
    recipe: RecipeFile = None,
    settings: Mapping[str, object],
    dry_run: DryRun = False,
    force: ForceOption = False,
    force_foreign: ForceForeign = False,
    max_staleness: MaxStaleness = None,
    without_damaged: WithoutDamaged = False,
    no_verify: NoVerify = False,
    average: Mapping[str, Any],
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write a checkpoint to resume from, or weights for Transformers.

    A policy or a recipe chooses the save that each layer comes from; all else comes from the base.
    DIR appears whole or not at all.

    \b
    Examples:
      layerstore compose sft@200 --policy parity --world-size 16 -o resume
      layerstore compose --recipe mix.yaml --pin mix --dry-run
      layerstore compose sft --mean last:3 --format hf -o mean
      layerstore compose best --format hf --dtype bf16 -o model
    """
    into = _format(**options)
    if not (dry_run or out or pin):
        hint = f"name a folder with -o DIR, or pass {'' if average else '--pin NAME or '}--dry-run"
        raise InvalidInput("compose does not know where to write", hint=hint)
    if (out is None or dry_run) and isinstance(into, Delta):
        raise into.unplanned()
    request = _Request(ref, run, step, exact, policy, recipe, settings, average, without_damaged, pin)
    with opened(store) as opened_store:
        composite = request.composite(opened_store)
        for note in composite.recipe_notes:
            print_warning(note)
        composite.check(max_staleness=max_staleness)
        if composite.is_dcp and not ({"format", "since"} & options.keys()):
            into = _dcp(composite, options)
        if out is None or dry_run:
            plan = composite.plan(into)
            if pin is not None and not dry_run:
                composite.pin(pin)
            outcome = "nothing was written" if pin is None or dry_run else f"kept as pin {shown(pin)}"
            facts: dict[str, object] = {"out": out and str(out), "pin": pin, "dry_run": dry_run}
            _print_plan(composite, plan, into=into, outcome=outcome, fields=facts, as_json=as_json)
            return
        with shown_progress(as_json=as_json) as progress:
            force_it: bool | Literal["foreign"] = "foreign" if force_foreign else force
            written = composite.export(out, format=into, verify=not no_verify, force=force_it, progress=progress)
        _print_written(composite, written, adam_step=getattr(into, "adam_step", None), as_json=as_json)
        if pin is not None:
            composite.pin(pin)  # last, so that a refused export leaves no pin


def _dcp(composite: "Composite", options: Mapping[str, object]) -> "Format":
    if "world_size" in options:
        raise InvalidInput(
            f"{composite.name} was saved by torch.distributed.checkpoint, which loads it on any number of ranks",
            hint="leave --world-size out, or use --format shards for DeepSpeed",
        )
    return chosen_format("dcp", options)


def _format(*, format: str = "shards", **options: object) -> "Format":  # noqa: A002  # as the option is called
    # `--format hf --since REF` writes a delta: what changed between two exports to hf.
    return chosen_format("delta" if format == "hf" and "since" in options else format, options)


# -- input ---------------------------------------------------------------------------------------------------------


def _policy(policy: str | None, settings: Mapping[str, object]) -> "str | Policy":
    from layerstore.policy import EXACT, LATEST, policy_named

    policy = policy or LATEST
    return policy if policy == EXACT and not settings else policy_named(policy, settings)


@dataclass(frozen=True, slots=True)
class _Request:
    ref: str | None
    run: str | None
    step: int | None
    exact: bool
    policy: str | None
    recipe: Path | None
    settings: Mapping[str, object]
    average: Mapping[str, Any]
    without_damaged: bool
    pin: str | None

    def composite(self, store: "Store") -> "Composite":
        """Return the composite; raise InvalidInput if options that exclude each other were given."""
        if self.average:
            if self.pin is not None:
                raise InvalidInput(
                    "an average cannot be pinned: no object of the store has its bytes", hint="write it with -o DIR"
                )
            self._check_alone("an average", {"--recipe": self.recipe}, "averages take saves as they are: leave it out")
            reference = chosen_reference(store, ref=self.ref, run=self.run, step=self.step)
            words = dict(self.average)
            return store.average(words.pop("mean", None), ref=reference, layers=words.pop("mean_layers", None), **words)
        if self.recipe is not None:
            given = {"REF": self.ref, "--step": self.step}
            self._check_alone("--recipe", given, "the recipe names its base and its layers")
            return store.compose(recipe=self.recipe, run=self.run, without_damaged=self.without_damaged)
        reference = chosen_reference(store, ref=self.ref, run=self.run, step=self.step)
        policy = _policy(self.policy, self.settings)
        return store.compose(reference, policy=policy, exact=self.exact, without_damaged=self.without_damaged)

    def _check_alone(self, what: str, given: Mapping[str, object], hint: str) -> None:
        """Raise InvalidInput if *what* came with *given*, or with another option that, like *what*, chooses layers."""
        damaged = self.without_damaged and bool(self.average)
        given = {**given, "--policy": self.policy, "--exact": self.exact or None, "--without-damaged": damaged or None}
        for name, value in {**given, **{f"--{setting}": value for setting, value in self.settings.items()}}.items():
            if value is not None:
                raise InvalidInput(f"{what} and {name} were both given", hint=hint)


# -- output --------------------------------------------------------------------------------------------------------


def _print_warnings_and_json(
    composite: "Composite", notes: tuple[str, ...], fields: Mapping[str, object], *, as_json: bool
) -> bool:
    """Print *notes* as warnings and, with ``--json``, the answer; return whether nothing is left to print."""
    for note in notes:
        print_warning(note)
    if as_json:
        print_json({**composite.summary(), "notes": [*composite.recipe_notes, *notes], **fields})
    return as_json


def _print_plan(
    composite: "Composite",
    plan: "Plan",
    *,
    into: "Format",
    outcome: str,
    fields: dict[str, object],
    as_json: bool,
) -> None:
    """Print what would be written: of a ZeRO checkpoint, each layer's save; of hf, the files; otherwise both."""
    from layerstore.assemble import ExportPlan

    if not isinstance(plan, ExportPlan):
        fields |= {"world_size": plan.world_size, "stage": plan.stage, "bytes_written": 0, "seconds": 0.0}
        if not _print_warnings_and_json(composite, plan.notes, fields, as_json=as_json):
            _print_layers(composite)
            print_line()
            _print_mixture(composite, adam_step=getattr(into, "adam_step", None))
            base = f"base {shown(composite.name)}, policy {composite.policy}"
            print_paragraph(f"{base}, {counted(plan.world_size, 'rank')}, ZeRO stage {plan.stage}; {outcome}", indent=2)
        return
    fields |= {"format": into.name, "dtype": plan.dtype, "files": [file.path for file in plan.files]}
    fields |= {"bytes_written": 0, "seconds": 0.0}
    if not _print_warnings_and_json(composite, plan.notes, fields, as_json=as_json):
        has_optimizer = into.name != "hf"
        if has_optimizer:
            _print_layers(composite)
            print_line()
        columns = [Column("FILE", folds=True), Column("SIZE", "right")]
        rows = ([file.path, size(file.size_bytes)] for file in plan.files)
        print_table(columns, rows, total=["total", size(plan.size_bytes)])
        print_line()
        if has_optimizer:
            _print_mixture(composite, adam_step=getattr(into, "adam_step", None))
        print_line(f"base {shown(composite.name)}, policy {composite.policy}, {plan.dtype}; {outcome}")


def _print_written(composite: "Composite", written: "Exported", *, adam_step: str | None, as_json: bool) -> None:
    """Print what was written, and how to load it."""
    from layerstore.delta import DeltaWritten
    from layerstore.shards import Written

    if isinstance(written, DeltaWritten):
        _print_delta(composite, written, as_json=as_json)
        return
    fields = {"out": str(written.out), "bytes_written": written.bytes_written, "seconds": written.seconds}
    if isinstance(written, Written):
        fields |= {"world_size": written.world_size, "stage": written.stage}
        ranks = counted(written.world_size, "rank")
        what = f"{counted(len(composite.layers), 'layer')}, {ranks}, ZeRO stage {written.stage}"
    else:
        fields |= {"format": written.format, "dtype": written.dtype, "files": list(written.files)}
        what = f"{written.dtype}, {counted(len(written.files), 'file')}"
    if _print_warnings_and_json(composite, written.notes, fields, as_json=as_json):
        return
    head = f"wrote {shown(written.out)}: {shown(composite.name)}, policy {written.policy}, {what}"
    print_paragraph(f"{head}, {size(written.bytes_written)} in {written.seconds:.1f} s", indent=2)
    _print_mixture(composite, has_optimizer=written.format != "hf", adam_step=adam_step)
    if written.how_to_load:
        print_paragraph(shown(written.how_to_load), indent=2)


def _print_delta(composite: "Composite", written: "DeltaWritten", *, as_json: bool) -> None:
    """Print what changed, and how to apply the delta."""
    fields = {**json_fields(written), "format": written.format}
    if _print_warnings_and_json(composite, written.notes, fields, as_json=as_json):
        return
    share = written.elements_changed / max(written.elements, 1)
    head = f"wrote {shown(written.out)}: {shown(written.since)} to {shown(composite.name)}, {written.encoding}"
    print_paragraph(
        f"{head}, {written.tensors_changed} of {counted(written.tensors, 'tensor')}, {share:.2%} of their elements, "
        f"{size(written.bytes_written)} instead of {size(written.bytes_whole)}, in {written.seconds:.1f} s",
        indent=2,
    )
    print_line(f"apply it with: layerstore apply {typed(str(written.out))} FOLDER")


def _print_layers(composite: "Composite") -> None:
    columns = [Column("LAYER", folds=True), Column("FROM", folds=True)]
    columns += [
        Column("STEPS BEHIND", "right"),
        Column("SAVES BEHIND", "right", drops=2),
        Column("SIZE", "right", drops=1),
    ]
    ages = composite.staleness.layers
    sizes = [sum(line.bytes_by_kind.values()) for line in composite.ls()]
    rows = (
        [
            age.layer,
            f"average, on {name}" if age.layer in composite.averaged else name,
            _behind(age.steps),
            _behind(age.saves),
            size(of_line),
        ]
        for age, name, of_line in zip(ages, composite.names_of(ages), sizes, strict=True)
    )
    print_table(columns, rows, total=["total", "", "", "", size(sum(sizes))])


def _behind(count: int | None) -> str:
    if count is None:
        return "?"
    return "newer" if count < 0 else str(count)


def _age(steps: int | None) -> str:
    if steps is None:
        return "of another run"
    return f"{counted(abs(steps), 'step')} {'newer than' if steps < 0 else 'behind'} the base"


def _print_mixture(composite: "Composite", *, has_optimizer: bool = True, adam_step: str | None = None) -> None:
    """Print the oldest layer's age, Adam steps that differ, layers due but not saved, and the step to resume at."""
    staleness, due = composite.staleness, composite.older_than_due
    lines = []
    if staleness.is_mixed:
        oldest = staleness.oldest
        [name] = composite.names_of([oldest])
        lines.append(f"oldest layer: {shown(oldest.layer)} from {shown(name)}, {_age(oldest.steps)}")
    if has_optimizer and len(staleness.optimizer_steps) > 1:
        lines.append(f"Adam steps differ: {_adam_steps(composite)}; {_written_as(composite, adam_step)}")
    if due:
        missed = f"{counted(len(due), 'layer')} {'was' if len(due) == 1 else 'were'} due but not saved"
        lines.append(f"{missed} (first: {shown(due[0])}); an older version is used")
    if has_optimizer and staleness.is_mixed:
        lines.append(f"training resumes at step {composite.step}")
    for line in lines:
        print_paragraph(line, indent=2)


def _adam_steps(composite: "Composite") -> str:
    """Return the update counts, each with its number of layers."""
    (first, layers), *others = composite.staleness.optimizer_steps.items()
    return ", ".join(
        [f"{first} in {counted(layers, 'layer')}", *(f"{step} in {layer_count:,}" for step, layer_count in others)]
    )


def _written_as(composite: "Composite", adam_step: str | None) -> str:
    if adam_step == "per-layer":
        return "each layer keeps its own"
    bases = (age.optimizer_step for age in composite.staleness.layers if age.steps == 0 and age.optimizer_step)
    return f"written as {next(bases, 'in the base')}"
