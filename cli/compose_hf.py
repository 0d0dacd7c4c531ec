"""``layerstore compose --format hf``: a folder for Transformers instead of shards to resume from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.cli.mixture import PlanOptions, composite_fields, say_mixture, say_notes
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import Column, counted, say, say_json, say_paragraph, say_table, shown, size

if TYPE_CHECKING:
    from layerstore import Composite
    from layerstore.ops.export import Exported, ExportPlan

FORMATS = ("zero3", "hf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What only ``--format hf`` takes; None where it was not given."""

    dtype: str | None
    max_shard_size: str | None


def is_export(form: str, options: ExportOptions, *, only_shards: Mapping[str, object]) -> bool:
    """
    Whether *form* is Transformers' format.

    Raises:
        InvalidInput: It is no format, or an option was given that it does not take: *options* or *only_shards*.
    """
    from layerstore.errors import InvalidInput

    if form not in FORMATS:
        raise InvalidInput(f"{form!r} is no format", hint=f"choose one of {', '.join(FORMATS)}")
    only_weights = {"--dtype": options.dtype, "--max-shard-size": options.max_shard_size}
    foreign, other, why = (
        (only_shards, "zero3", "an export has neither ranks nor an optimizer")
        if form == "hf"
        else (only_weights, "hf", "shards keep the types and the files that were saved")
    )
    for name, value in foreign.items():
        if value is not None:
            raise InvalidInput(f"{name} is for --format {other} only", hint=why)
    return form == "hf"


def export(
    composite: "Composite", asked: PlanOptions, options: ExportOptions, *, verify: bool, force: bool, as_json: bool
) -> None:
    """Write the export and say so, or in a dry run, or without a folder, only what it would be."""
    from layerstore.export.hf import MAX_SHARD_SIZE

    max_shard_size = options.max_shard_size or MAX_SHARD_SIZE
    out = asked.out
    if out is None or asked.is_dry_run:
        _say_plan(composite, composite.plan_export(dtype=options.dtype, max_shard_size=max_shard_size), asked, as_json)
        return
    with shown_progress(as_json=as_json) as progress:
        exported = composite.export(
            out, dtype=options.dtype, max_shard_size=max_shard_size, verify=verify, force=force, progress=progress
        )
    say_notes(exported.notes)
    if as_json:
        say_json(
            _fields(
                composite,
                exported,
                out=exported.out,
                files=exported.files,
                bytes_written=exported.bytes_written,
                seconds=exported.seconds,
            )
        )
        return
    say_paragraph(
        f"wrote {shown(exported.out)}: {shown(composite.name)}, policy {exported.policy}, "
        f"{exported.dtype}, {counted(len(exported.files), 'file')}, "
        f"{size(exported.bytes_written)} in {exported.seconds:.1f} s",
        indent=2,
    )
    say_mixture(composite, has_optimizer=False)
    if "adapter_config.json" in exported.files:
        say_paragraph("load it with PeftModel.from_pretrained(BASE_MODEL, FOLDER)", indent=2)
    elif "config.json" in exported.files:
        say_paragraph(f"load it with {exported.model_class or 'AutoModel'}.from_pretrained(FOLDER)", indent=2)


def _say_plan(composite: "Composite", plan: "ExportPlan", asked: PlanOptions, as_json: bool) -> None:
    say_notes(plan.notes)
    if as_json:
        files = tuple(file.path for file in plan.files)
        fields = _fields(composite, plan, out=asked.out, files=files, bytes_written=0, seconds=0.0)
        say_json({**fields, "pin": asked.pin, "dry_run": asked.is_dry_run})
        return
    columns = [Column("FILE", folds=True), Column("SIZE", "right")]
    rows = ([file.path, size(file.size_bytes)] for file in plan.files)
    say_table(columns, rows, total=["total", size(plan.size_bytes)])
    say()
    say(f"base {shown(composite.name)}, policy {composite.policy}, {plan.dtype}; {asked.outcome}")


def _fields(
    composite: "Composite",
    export: "Exported | ExportPlan",
    *,
    out: Path | None,
    files: tuple[str, ...],
    bytes_written: int,
    seconds: float,
) -> dict[str, object]:
    return {
        **composite_fields(composite, export.notes),
        "out": None if out is None else str(out),
        "format": "hf",
        "dtype": export.dtype,
        "files": list(files),
        "bytes_written": bytes_written,
        "seconds": seconds,
    }
