"""``layerstore ls``: the layers of one commit, and what each holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.options import AsJson, Reference, StorePath, opened
from layerstore.cli.render import Column, say_json, say_table, size

if TYPE_CHECKING:
    from layerstore.ops.queries import LayerLine


def ls(
    ref: Reference = None,
    layer: Annotated[str | None, typer.Argument(metavar="LAYER", help="Only this layer.", show_default=False)] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    List a commit's layers with their sizes.

    \b
    Examples:
      layerstore ls sft@200
      layerstore ls sft model.layers.3 --json
    """
    with opened(store) as opened_store:
        lines = opened_store.ls(ref, layer=layer)
    if as_json:
        say_json({"layers": [layer_fields(line) for line in lines]})
        return
    kinds = [kind for kind in lines[0].bytes_by_kind if any(line.bytes_by_kind[kind] for line in lines)]
    columns = [
        Column("LAYER", folds=True),
        Column("STEP", "right"),
        Column("PARAMETERS", "right"),
        *(Column(kind.upper(), "right") for kind in kinds),
        Column("SIZE", "right"),
    ]
    total = [
        "total",
        "",
        f"{sum(line.parameters for line in lines):,}",
        *(_size(sum(line.bytes_by_kind[kind] for line in lines)) for kind in kinds),
        size(sum(sum(line.bytes_by_kind.values()) for line in lines)),
    ]
    several_runs = len({line.run for line in lines}) > 1
    say_table(
        columns, (_row(line, kinds, with_run=several_runs) for line in lines), total=total if len(lines) > 1 else None
    )


def _row(line: "LayerLine", kinds: list[str], *, with_run: bool) -> list[str]:
    return [
        f"{line.layer} (frozen)" if line.frozen else line.layer,
        f"{line.run}@{line.step}" if with_run else str(line.step),
        f"{line.parameters:,}",
        *(_size(line.bytes_by_kind[kind]) for kind in kinds),
        size(sum(line.bytes_by_kind.values())),
    ]


def _size(size_bytes: int) -> str:
    return size(size_bytes) if size_bytes else "-"


def layer_fields(line: "LayerLine") -> dict[str, object]:
    """Return one layer as programs read it."""
    return {
        "layer": line.layer,
        "run": line.run,
        "step": line.step,
        "version": line.version,
        "parameters": line.parameters,
        "frozen": line.frozen,
        "bytes": line.bytes_by_kind,
    }
