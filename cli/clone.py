"""``layerstore clone``: copy a remote to a new store."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

import layerstore
from layerstore.cli.commands import About
from layerstore.cli.options import AsJson
from layerstore.cli.progress import shown_progress
from layerstore.cli.render import counted, output, print_json, print_line, print_note, shown, with_store
from layerstore.cli.shares import shares

ABOUT = About("Elsewhere", store=None)


def clone(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER.")],
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A new or empty folder. [default: the last name in the URL]")
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Fetch only records now; each tensor is fetched once when needed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """
    Copy a remote to a new store; the remote becomes its origin.

    A killed clone resumes where it stopped; just repeat the command.

    \b
    Examples:
      layerstore clone s3://checkpoints/sft
      layerstore clone s3://checkpoints/sft /scratch/me/store
      layerstore clone --records s3://checkpoints/sft /scratch/me/partial
    """
    parts = urlsplit(url)
    path = path or Path((parts.path.strip("/") or parts.netloc).rpartition("/")[2] or "store")
    with (
        shown_progress(as_json=as_json) as progress,
        layerstore.clone(url, path, records=records, shares=shares(), progress=progress) as made,
    ):
        commits, pins = len(made.log()), len(made.pins())
        if as_json:
            print_json({"path": str(made.path), "id": made.id, "url": url, "commits": commits, "pins": pins})
            return
        print_line(f"cloned {shown(url)} to {shown(made.path)}: {counted(commits, 'commit')}, {counted(pins, 'pin')}")
        output.store = str(path)
        print_note(with_store("next: layerstore log"))
