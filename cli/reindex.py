"""``layerstore reindex``: rebuild the index."""

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, say, say_json

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
        say_json({"commits": commits})
    else:
        say(f"rebuilt the index; it covers {counted(commits, 'commit')}")
