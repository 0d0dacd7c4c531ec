"""``layerstore apply``: apply a delta to an export."""

from pathlib import Path
from typing import Annotated

import typer

import layerstore
from layerstore.cli.commands import About
from layerstore.cli.options import AsJson
from layerstore.cli.render import counted, print_json, print_line, shown
from layerstore.json_fields import json_fields
from layerstore.units import size

ABOUT = About("Rarely needed", store=None)


def apply(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="What compose --since wrote.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="An export of the delta's base.")],
    *,
    as_json: AsJson = False,
) -> None:
    """
    Apply a delta to an export of its base.

    Each tensor's checksum is checked before and after; nothing changes unless all match.
    Tensors that already match the target are skipped. No store is needed.

    \b
    Examples:
      layerstore compose sft@1100 --format hf -o model
      layerstore compose sft@1200 --format hf --since sft@1100 -o delta
      layerstore apply delta model
    """
    applied = layerstore.apply(delta, folder)
    if as_json:
        print_json(json_fields(applied))
        return
    if not applied.tensors_changed:
        print_line(f"{shown(folder)} already matches {shown(applied.name)}; nothing was written")
        return
    changed = counted(applied.tensors_changed, "tensor")
    took = f"{size(applied.bytes_written)} in {applied.seconds:.1f} s"
    print_line(f"{shown(folder)} now matches {shown(applied.name)}: {changed} changed, {took}")
