"""``layerstore reindex``: make the index afresh."""

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, say, say_json


def reindex(*, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Make the index afresh.

    It is made from the commit records, which are the truth.

    \b
    Examples:
      layerstore reindex
    """
    with opened(store) as opened_store:
        done = opened_store.reindex()
    if as_json:
        say_json({"commits": done.commits})
        return
    say(f"rebuilt the index; it covers {counted(done.commits, 'commit')}")
