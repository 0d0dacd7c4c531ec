"""``layerstore remote``: name remotes."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import (
    Column,
    output,
    print_json,
    print_line,
    print_note,
    print_rows,
    shown,
    with_store,
)
from layerstore.errors import InvalidInput

if TYPE_CHECKING:
    from layerstore import Store

ABOUT = About("Elsewhere")


def remote(
    action: Annotated[Literal["add", "list", "remove"], typer.Argument(metavar="add|list|remove")] = "list",
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The remote's name; remove also takes the URL of an unnamed remote."),
    ] = None,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER.")
    ] = None,
    *,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Name the buckets that this store is pushed to and pulled from.

    Keys and endpoints are not stored: they come from the environment, as for the clouds' own tools.
    Buckets that were pushed to or pulled from by URL are listed, too, with - for a name.
    Removing a remote forgets what was pushed to it, and does not touch the bucket.

    \b
    Examples:
      layerstore remote add origin s3://checkpoints/sft
      layerstore remote list
      layerstore remote remove origin
    """
    count = {"add": 2, "list": 0, "remove": 1}[action]
    arguments = [argument for argument in (name, url) if argument is not None]
    if len(arguments) != count:
        takes = {"add": "NAME and URL", "list": "nothing else", "remove": "NAME or URL"}[action]
        raise InvalidInput(f"remote {action} takes {takes}", hint="layerstore remote --help")
    with opened(store) as opened_store:
        if action == "list":
            _print_remotes(opened_store, as_json=as_json)
            return
        recorded = (opened_store.remotes.add if action == "add" else opened_store.remotes.remove)(*arguments)
    if as_json:
        print_json({"action": action, "name": name, "url": recorded})
    elif action == "add":
        print_line(f"{shown(name)} is {shown(recorded)}")
        print_note(with_store(f"next: layerstore push {name}"))
    else:
        print_line(f"{shown(name)} is no longer a remote; nothing at {shown(recorded)} was removed")


def remote_names(store: "Store") -> dict[str, str]:
    """Return a label for each remote of *store*, by URL: its name, the URL's end, or the URL if two end alike."""
    names = {url: name for name, url in store.remotes.urls().items()}
    ends = {url: url.rpartition("/")[2] for url in _unnamed(store)}
    alike = Counter(ends.values())
    return names | {url: f"…/{end}" if alike[end] == 1 else url for url, end in ends.items()}


def _unnamed(store: "Store") -> list[str]:
    """Return the URLs without a name that *store* was pushed to or pulled from."""
    from layerstore.history import pushed_to

    named = store.remotes.urls().values()
    return [url for url in pushed_to(store.repo) if url not in named]


def _print_remotes(store: "Store", *, as_json: bool) -> None:
    urls = store.remotes.urls()
    output.answers = True
    if as_json:
        print_json({"remotes": [{"name": name, "url": url} for name, url in urls.items()]})
    elif rows := [*urls.items(), *(("-", url) for url in _unnamed(store))]:
        print_rows({Column("NAME"): lambda row: row[0], Column("URL", folds=True): lambda row: row[1]}, rows)
    else:
        is_remote = store.repo.remote is not None
        add = "layerstore remote add NAME URL"
        print_note("a remote has no remotes of its own" if is_remote else f"no remotes yet; next: {with_store(add)}")
