"""``layerstore init``: make a store."""

from pathlib import Path
from typing import Annotated

import typer

import layerstore
from layerstore.cli.commands import About
from layerstore.cli.options import DEFAULT_STORE, AsJson, StorePath
from layerstore.cli.render import output, print_json, print_line, print_note, shown, with_store
from layerstore.errors import InvalidInput

ABOUT = About("Save", store=None)


def init(
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="A new or empty folder, or a bucket's URL.")
    ] = None,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Make a store.

    \b
    Examples:
      layerstore init
      layerstore init /scratch/me/store
      layerstore init s3://checkpoints/team
    """
    named = output.store
    if path is not None and named is not None and Path(named).absolute() != Path(path).absolute():
        raise InvalidInput(f"two stores were given: {path} and --store {named}", hint="leave one of them out")
    with layerstore.init(path or store or DEFAULT_STORE) as made:
        if as_json:
            print_json({"path": made.repo.name, "id": made.id})
            return
        print_line(f"created the store {shown(made.repo.name)}, id {made.id}")
        output.store = path or store
        print_note(with_store("next: layerstore ingest CHECKPOINT"))
