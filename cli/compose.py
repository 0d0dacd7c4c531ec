"""``layerstore compose``: a ZeRO checkpoint, or a folder for another library, from stored layers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import (
    AsJson,
    Reference,
    StorePath,
    Table,
    chosen_reference,
    one_of,
    opened,
    with_options,
)
from layerstore.cli.policy import choices, with_settings
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import Column, counted, say, say_json, say_paragraph, say_table, say_warning, shown
from layerstore.dtypes import DTypeName
from layerstore.errors import InvalidInput
from layerstore.json_fields import json_fields
from layerstore.layers import typed
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore import Composite, Store
    from layerstore.assemble import Exported, ExportPlan
    from layerstore.delta import DeltaWritten
    from layerstore.policy import Policy
    from layerstore.shards import Written

ABOUT = About("Restore", store="reads", elsewhere=("export", "extract", "get", "load", "merge", "restore", "resume"))

# The headings of its help.
_SOURCE, _OUTPUT, _SAFETY = "Source", "Output", "Safety"

PolicyName = Annotated[
    str | None,
    typer.Option(
        metavar="P",
        help=f"Where layers are from: {', '.join(choices())}, filter:every=10. [default: latest]",
        rich_help_panel=_SOURCE,
    ),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", metavar="F", help="A file that says where each layer is from.", rich_help_panel=_SOURCE),
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
        "--pin", metavar="NAME", help="Keep the composite under this name, written or not.", rich_help_panel=_OUTPUT
    ),
]
RunName = Annotated[str | None, typer.Option(metavar="R", help="The run, instead of REF.", rich_help_panel=_SOURCE)]
Step = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="The step, instead of REF.", rich_help_panel=_SOURCE)
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        metavar="W", min=1, help="For how many ranks. [default: as many as the base has]", rich_help_panel=_OUTPUT
    ),
]
_AdamStep = Literal["unify", "per-layer"]
_Form = Literal["shards", "zero3", "hf", "dcp", "universal"]
Format = Annotated[
    _Form,
    typer.Option(
        "--format",
        metavar=one_of(_Form),
        help="shards: to resume from, as they were saved; zero3: the same for stage 3, whatever stage saved them; "
        "hf: weights for from_pretrained; dcp: for PyTorch's FSDP2; universal: DeepSpeed's Universal Checkpoint.",
        rich_help_panel=_OUTPUT,
    ),
]
WithoutDamaged = Annotated[
    bool,
    typer.Option(
        "--without-damaged",
        help="Read it all first; take an older version of what is damaged.",
        rich_help_panel=_SAFETY,
    ),
]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not check what is read; sizes only.", rich_help_panel=_SAFETY)
]
Force = Annotated[bool, typer.Option("--force", help="Replace DIR, if layerstore wrote it.", rich_help_panel=_SAFETY)]
ForceForeign = Annotated[
    bool,
    typer.Option(
        "--force-foreign",
        help="Replace DIR, even a checkpoint or export that something else wrote.",
        rich_help_panel=_SAFETY,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.", rich_help_panel=_SAFETY)]
_OPTIONS: dict[_Form, tuple[str, ...]] = {
    "shards": ("world_size", "adam_step", "moments"),
    "zero3": ("world_size", "adam_step", "moments"),
    "hf": ("dtype", "max_shard_size", "since", "encoding"),
    "dcp": ("adam_step",),
    "universal": (),
}
_WHY_NOT: dict[_Form, str] = {
    "shards": "shards keep the types and the files that were saved",
    "zero3": "shards keep the types and the files that were saved",
    "hf": "an export has neither ranks nor an optimizer",
    "universal": "a universal checkpoint fits any number of ranks, and has one count of updates",
    "dcp": "a distributed checkpoint fits any number of ranks, and keeps the types that were saved",
}
_PLANNERS: "dict[_Form, Callable[[Composite], Callable[..., ExportPlan]]]" = {
    "hf": lambda composite: composite.plan_export,
    "dcp": lambda composite: composite.plan_dcp,
    "universal": lambda composite: composite.plan_universal,
}
_WRITERS: "dict[_Form, Callable[[Composite], Callable[..., Written | Exported]]]" = {
    "shards": lambda composite: composite.write,
    "hf": lambda composite: composite.export,
    "dcp": lambda composite: composite.write_dcp,
    "universal": lambda composite: composite.write_universal,
}
_Encoding = Literal["xor", "sparse"]
_Moments = Literal["base", "fresh"]
_FORM_OPTIONS: Table = {
    "adam_step": (
        _AdamStep,
        one_of(_AdamStep),
        "The optimizer's step counters: the base's (unify), or each layer's own. [default: unify]",
    ),
    "moments": (
        _Moments,
        one_of(_Moments),
        "The optimizer's moments: the base's, or zero and its counters too. [default: base]",
    ),
    "dtype": (DTypeName, one_of(DTypeName), "With hf: the element type. [default: as trained]"),
    "max_shard_size": (str, "SIZE", "With hf: the largest file. [default: 5GB]"),
    "since": (str, "REF", "With hf: only what changed since this commit; see apply."),
    "encoding": (_Encoding, one_of(_Encoding), "With --since: how changes are written. [default: xor]"),
}
_AVERAGE: Table = {
    "mean": (str, "SAVES", "Average the masters of these saves: last:10, or sft@800,sft@900:2 with weights."),
    "ema": (float, "B", "Weigh the last saves: each B times the one after it."),
    "mean_layers": (str, "PATTERN", "Average only these layers; the others are REF's."),
}
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="DIR", help="Where to write.", rich_help_panel=_OUTPUT)
]


@with_settings
@with_options("average", _AVERAGE, panel="Average")
@with_options("options", _FORM_OPTIONS, panel=_OUTPUT)
def compose(
    ref: Reference = None,
    *,
    run: RunName = None,
    step: Step = None,
    policy: PolicyName = None,
    recipe: RecipeFile = None,
    settings: Mapping[str, object],
    average: Mapping[str, Any],
    out: Out = None,
    form: Format = "shards",
    world_size: WorldSize = None,
    options: Mapping[str, Any],
    pin: PinName = None,
    dry_run: DryRun = False,
    force: Force = False,
    force_foreign: ForceForeign = False,
    max_staleness: MaxStaleness = None,
    without_damaged: WithoutDamaged = False,
    no_verify: NoVerify = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Write a checkpoint to resume from, or weights for Transformers.

    The policy or recipe says which save each layer comes from; all else is REF's. DIR appears whole or not at all.
    With --mean, its masters are an average of several saves.

    \b
    {policies}

    \b
    Examples:
      layerstore compose sft@200 --policy parity --world-size 16 -o resume
      layerstore compose --recipe mix.yaml --pin mix --dry-run
      layerstore compose sft --mean last:3 --format hf -o mean
      layerstore compose best --format hf --dtype bf16 -o model
    """
    options = options if world_size is None else {"world_size": world_size, **options}
    _check(form, options, is_useful=bool(dry_run or out or pin), can_pin=not average)
    _check_delta(options, has_place=out is not None, dry_run=dry_run)
    if form == "zero3":
        form, options = "shards", {"as_zero3": True, **options}
    source = _Source(ref, run, step, policy, recipe, settings, average, without_damaged, pin)
    with opened(store) as opened_store:
        composite = source.composite(opened_store)
        for note in composite.recipe_notes:
            say_warning(note)
        composite.check(max_staleness=max_staleness)
        if out is None or dry_run:
            if pin is not None and not dry_run:
                _pin(composite, pin, form=form, options=options)
            outcome = "nothing was written" if pin is None or dry_run else f"kept as pin {shown(pin)}"
            facts: dict[str, object] = {"out": out and str(out), "pin": pin, "dry_run": dry_run}
            (_plan_shards if form == "shards" else _plan_export)(
                composite, form, options, outcome, facts, as_json=as_json
            )
            return
        with shown_progress(as_json=as_json) as progress:
            force_it: bool | Literal["foreign"] = "foreign" if force_foreign else force
            writer = composite.write_delta if "since" in options else _WRITERS[form](composite)
            written = writer(out, verify=not no_verify, force=force_it, progress=progress, **options)
        _say_written(composite, written, adam_step=options.get("adam_step"), as_json=as_json)
        if pin is not None:
            composite.pin(pin)  # last, when nothing can be refused any more


def _pin(composite: "Composite", name: str, *, form: _Form, options: Mapping[str, Any]) -> None:
    """Pin *composite*, unless it would be refused in that form."""
    (composite.notes if form == "shards" else _PLANNERS[form](composite))(**options)
    composite.pin(name)


# -- input ---------------------------------------------------------------------------------------------------------


def _check(form: _Form, options: Mapping[str, object], *, is_useful: bool, can_pin: bool) -> None:
    """Raise InvalidInput if one of *options* is for another format than *form*, or there is nothing to do."""
    for name in options:
        if name not in _OPTIONS[form]:
            others = " and ".join(other for other, names in _OPTIONS.items() if name in names)
            raise InvalidInput(f"--{name.replace('_', '-')} is for --format {others} only", hint=_WHY_NOT[form])
    if not is_useful:
        hint = f"name a folder with -o DIR, or pass {'--pin NAME or ' if can_pin else ''}--dry-run"
        raise InvalidInput("compose does not know where to write", hint=hint)


def _check_delta(options: Mapping[str, object], *, has_place: bool, dry_run: bool) -> None:
    """Raise InvalidInput if options of a delta do not go together."""
    if "since" not in options:
        if "encoding" in options:
            raise InvalidInput("--encoding is of a delta", hint="--since REF says what it starts from")
        return
    if "max_shard_size" in options:
        raise InvalidInput("--since and --max-shard-size were both given", hint="a delta has files of its own size")
    if dry_run:
        raise InvalidInput("--since and --dry-run were both given", hint="what changed is known once it is read")
    if not has_place:
        raise InvalidInput("--since needs a place to write to", hint="name a folder with -o DIR")


def _policy(policy: str | None, settings: Mapping[str, object]) -> "str | Policy":
    from layerstore.policy import EXACT, LATEST, policy_named

    policy = policy or LATEST
    return policy if policy == EXACT and not settings else policy_named(policy, settings)


@dataclass(frozen=True, slots=True)
class _Source:
    """What is to be composed."""

    ref: str | None
    run: str | None
    step: int | None
    policy: str | None
    recipe: Path | None
    settings: Mapping[str, object]
    average: Mapping[str, Any]
    without_damaged: bool
    pin: str | None

    def composite(self, store: "Store") -> "Composite":
        """Return it; raise InvalidInput if what was given does not go together."""
        if self.average:
            if self.pin is not None:
                raise InvalidInput(
                    "an average cannot be pinned: no object of the store has its bytes", hint="write it with -o DIR"
                )
            self._check_alone("an average", {"--recipe": self.recipe}, "it takes each save as it is: leave that out")
            reference = chosen_reference(store, ref=self.ref, run=self.run, step=self.step)
            words = dict(self.average)
            return store.average(words.pop("mean", None), ref=reference, layers=words.pop("mean_layers", None), **words)
        if self.recipe is not None:
            given = {"REF": self.ref, "--step": self.step}
            self._check_alone("--recipe", given, "the recipe names its base and its layers")
            return store.compose(recipe=self.recipe, run=self.run, without_damaged=self.without_damaged)
        reference = chosen_reference(store, ref=self.ref, run=self.run, step=self.step)
        policy = _policy(self.policy, self.settings)
        return store.compose(reference, policy=policy, without_damaged=self.without_damaged)

    def _check_alone(self, what: str, given: Mapping[str, object], hint: str) -> None:
        """Raise InvalidInput if *given*, a policy or its settings were given for *what* decides itself."""
        damaged = self.without_damaged and bool(self.average)
        given = {**given, "--policy": self.policy, "--without-damaged": damaged or None}
        for name, value in {**given, **{f"--{setting}": value for setting, value in self.settings.items()}}.items():
            if value is not None:
                raise InvalidInput(f"{what} and {name} were both given", hint=hint)


# -- output --------------------------------------------------------------------------------------------------------


def _tell_programs(
    composite: "Composite", notes: tuple[str, ...], fields: Mapping[str, object], *, as_json: bool
) -> bool:
    """Print *notes* as warnings and, with ``--json``, the answer; return whether nothing is left to print."""
    for note in notes:
        say_warning(note)
    if as_json:
        say_json({**composite.summary(), "notes": [*composite.recipe_notes, *notes], **fields})
    return as_json


def _plan_shards(
    composite: "Composite",
    _form: _Form,
    options: Mapping[str, Any],
    outcome: str,
    fields: dict[str, object],
    *,
    as_json: bool,
) -> None:
    """Print which save each layer comes from."""
    notes = composite.notes(**options)
    world_size = options.get("world_size", composite.world_size)
    stage = 3 if options.get("as_zero3") else composite.stage
    fields |= {"world_size": world_size, "stage": stage, "bytes_written": 0, "seconds": 0.0}
    if not _tell_programs(composite, notes, fields, as_json=as_json):
        _say_layers(composite)
        say()
        _say_mixture(composite, adam_step=options.get("adam_step"))
        base = f"base {shown(composite.name)}, policy {composite.policy}"
        say_paragraph(f"{base}, {counted(world_size, 'rank')}, ZeRO stage {stage}; {outcome}", indent=2)


def _plan_export(
    composite: "Composite",
    form: _Form,
    options: Mapping[str, Any],
    outcome: str,
    fields: dict[str, object],
    *,
    as_json: bool,
) -> None:
    """Print the files that there would be."""
    plan = _PLANNERS[form](composite)(**options)
    fields |= {"format": form, "dtype": plan.dtype, "files": [file.path for file in plan.files]}
    fields |= {"bytes_written": 0, "seconds": 0.0}
    if not _tell_programs(composite, plan.notes, fields, as_json=as_json):
        columns = [Column("FILE", folds=True), Column("SIZE", "right")]
        rows = ([file.path, size(file.size_bytes)] for file in plan.files)
        say_table(columns, rows, total=["total", size(plan.size_bytes)])
        say()
        say(f"base {shown(composite.name)}, policy {composite.policy}, {plan.dtype}; {outcome}")


def _say_written(
    composite: "Composite", written: "Written | Exported | DeltaWritten", *, adam_step: str | None, as_json: bool
) -> None:
    """Say what was written, and how to load it."""
    from layerstore.assemble import Exported
    from layerstore.delta import DeltaWritten

    if isinstance(written, DeltaWritten):
        _say_delta(composite, written, as_json=as_json)
        return
    fields = {"out": str(written.out), "bytes_written": written.bytes_written, "seconds": written.seconds}
    how, folder = "", shown(json.dumps(str(written.out), ensure_ascii=False))  # as Python writes it
    if isinstance(written, Exported):
        fields |= {"format": written.format, "dtype": written.dtype, "files": list(written.files)}
        what = f"{written.dtype}, {counted(len(written.files), 'file')}"
        how = shown(written.how_to_load)
    else:
        fields |= {"world_size": written.world_size, "stage": written.stage}
        ranks = counted(written.world_size, "rank")
        what = f"{counted(len(composite.layers), 'layer')}, {ranks}, ZeRO stage {written.stage}"
        load = f"engine.load_checkpoint({folder}), or trainer.train(resume_from_checkpoint={folder})"
        how = f"resume on {ranks}: {load}"
    if _tell_programs(composite, written.notes, fields, as_json=as_json):
        return
    head = f"wrote {shown(written.out)}: {shown(composite.name)}, policy {written.policy}, {what}"
    say_paragraph(f"{head}, {size(written.bytes_written)} in {written.seconds:.1f} s", indent=2)
    has_optimizer = not isinstance(written, Exported) or written.format != "hf"
    _say_mixture(composite, has_optimizer=has_optimizer, adam_step=adam_step)
    if how:
        say_paragraph(how, indent=2)


def _say_delta(composite: "Composite", written: "DeltaWritten", *, as_json: bool) -> None:
    """Say what changed, and how it is put on."""
    fields = json_fields(written)
    if _tell_programs(composite, written.notes, {**fields, "format": "hf"}, as_json=as_json):
        return
    share = written.elements_changed / max(written.elements, 1)
    head = f"wrote {shown(written.out)}: {shown(written.since)} to {shown(composite.name)}, {written.encoding}"
    say_paragraph(
        f"{head}, {written.tensors_changed} of {counted(written.tensors, 'tensor')}, {share:.2%} of their elements, "
        f"{size(written.bytes_written)} instead of {size(written.bytes_whole)}, in {written.seconds:.1f} s",
        indent=2,
    )
    say(f"put it on with layerstore apply {typed(str(written.out))} FOLDER")


def _say_layers(composite: "Composite") -> None:
    """Print the table of layers."""
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
    say_table(columns, rows, total=["total", "", "", "", size(sum(sizes))])


def _behind(count: int | None) -> str:
    if count is None:
        return "?"
    return "newer" if count < 0 else str(count)


def _age(steps: int | None) -> str:
    if steps is None:
        return "of another run"
    return f"{counted(abs(steps), 'step')} {'newer than' if steps < 0 else 'behind'} the base"


def _say_mixture(composite: "Composite", *, has_optimizer: bool = True, adam_step: str | None = None) -> None:
    """Say how old the oldest layer is, and anything else about the mixture that a reader should know."""
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
        say_paragraph(line, indent=2)


def _adam_steps(composite: "Composite") -> str:
    """Return the update counts, each with its number of layers."""
    (first, layers), *others = composite.staleness.optimizer_steps.items()
    return ", ".join([f"{first} in {counted(layers, 'layer')}", *(f"{step} in {of:,}" for step, of in others)])


def _written_as(composite: "Composite", adam_step: str | None) -> str:
    if adam_step == "per-layer":
        return "each layer keeps its own"
    bases = (age.optimizer_step for age in composite.staleness.layers if age.steps == 0 and age.optimizer_step)
    return f"written as {next(bases, 'in the base')}"
