"""``layerstore init``: make a store."""

from pathlib import Path
from typing import Annotated

import typer

from layerstore.cli.options import DEFAULT_STORE, AsJson, StorePath
from layerstore.cli.render import say, say_json, shown


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A new or empty folder.", show_default=False)
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
    """
    import layerstore

    with layerstore.init(path or store or DEFAULT_STORE) as made:
        if as_json:
            say_json({"path": str(made.path), "id": made.id})
            return
        say(f"made the store {shown(made.path)}, id {made.id}")
        say("next: layerstore ingest CHECKPOINT")
