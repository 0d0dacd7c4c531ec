"""``layerstore reindex``: rebuild the index."""

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, print_json, print_line

ABOUT = About("Rarely needed")


def reindex(*, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Rebuild the index from the commit records.

    \b
    Examples:
      layerstore reindex
    """
    with opened(store) as opened_store:
        commits = opened_store.reindex()
    if as_json:
        print_json({"commits": commits})
    else:
        print_line(f"rebuilt the index; it covers {counted(commits, 'commit')}")
