"""``layerstore reindex``: make the index afresh."""

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, say, say_json


def reindex(*, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Make the index afresh from the commit records.

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
