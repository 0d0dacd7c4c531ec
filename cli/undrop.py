"""``layerstore undrop``: bring a commit back from the trash."""

from typing import Annotated

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import print_json, print_line, shown
from layerstore.units import short_id

ABOUT = About("Restore", elsewhere=("undelete", "unrm"))


def undrop(
    ref: Annotated[str, typer.Argument(metavar="REF", help="RUN@STEP, or a commit's id.")],
    *,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Bring a dropped or replaced commit back.

    layerstore log --dropped lists what is in the trash.

    \b
    Examples:
      layerstore drop sft@200
      layerstore undrop sft@200
    """
    with opened(store) as opened_store:
        commit = opened_store.undrop(ref)
    record = commit.record
    if as_json:
        print_json({"run": record.run, "step": record.step, "attempt": record.attempt, "commit": commit.id})
    else:
        print_line(f"{shown(f'{record.run}@{record.step}')} is back (commit {short_id(commit.id)})")
