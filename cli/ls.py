"""``layerstore ls``: the layers of one commit, and what each holds."""

from typing import TYPE_CHECKING, Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, ReferenceArgument, StorePath, opened
from layerstore.cli.render import Column, print_json, print_table
from layerstore.cli.show import refers_to
from layerstore.json_fields import json_fields
from layerstore.units import size

if TYPE_CHECKING:
    from layerstore.inspect import LayerLine

ABOUT = About("Look", store="anywhere", answers=True)


def ls(
    ref: ReferenceArgument = None,
    layer: Annotated[str | None, typer.Argument(metavar="LAYER", help="Only this layer.")] = None,
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
        names = opened_store.names_of(lines)
    if as_json:
        print_json({"layers": [json_fields(line) for line in lines]})
        return
    kinds = [kind for kind in lines[0].bytes_by_kind if any(line.bytes_by_kind[kind] for line in lines)]
    columns = [
        Column("LAYER", folds=True),
        Column("STEP", "right"),
        Column("PARAMETERS", "right", drops=2),
        *(Column(kind.upper(), "right", drops=1) for kind in kinds),
        Column("SIZE", "right"),
    ]
    if are_compact := any(not line.is_exact for line in lines):
        columns.append(Column("REFERS TO", folds=True))
    total = [
        "total",
        "",
        f"{sum(line.parameters for line in lines):,}",
        *(_size(sum(line.bytes_by_kind[kind] for line in lines)) for kind in kinds),
        size(sum(sum(line.bytes_by_kind.values()) for line in lines)),
        *([""] if are_compact else []),
    ]
    # The step alone is enough if all versions belong to one history.
    is_one_history = all(name == f"{lines[0].run}@{line.step}" for name, line in zip(names, lines, strict=True))
    steps = [str(line.step) for line in lines] if is_one_history else names
    rows = (
        _row(line, step, kinds) + ([refers_to(line)] if are_compact else [])
        for line, step in zip(lines, steps, strict=True)
    )
    print_table(columns, rows, total=total if len(lines) > 1 else None)


def _row(line: "LayerLine", step: str, kinds: list[str]) -> list[str]:
    return [
        f"{line.layer} (frozen)" if line.frozen else line.layer,
        step,
        f"{line.parameters:,}",
        *(_size(line.bytes_by_kind[kind]) for kind in kinds),
        size(sum(line.bytes_by_kind.values())),
    ]


def _size(size_bytes: int) -> str:
    return size(size_bytes) if size_bytes else "-"
