"""``layerstore reindex``: make the index afresh."""

from typing import Annotated

import typer

from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.render import counted, say, say_json, say_warning, shown

_NAMES_MAX = 5


def reindex(
    *,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget records that have vanished, and their copies with them.")
    ] = False,
    store: StorePath = None,
    as_json: AsJson = False,
) -> None:
    """
    Make the index afresh.

    It is made from the commit records, which are the truth.
    Records that have vanished it goes on naming, and keeps their copies for a repair, unless --forget is given.

    \b
    Examples:
      layerstore reindex
      layerstore reindex --forget
    """
    with opened(store) as opened_store:
        done = opened_store.reindex(forget=forget)
    vanished, forgotten = (
        [f"{name.run}@{name.step} (commit {name.id[:12]})" for name in names]
        for names in (done.vanished, done.forgotten)
    )
    if as_json:
        say_json({"commits": done.commits, "vanished": vanished, "forgotten": forgotten})
        return
    for each in forgotten:
        say(f"forgot {shown(each)}, whose record had vanished")
    say(f"rebuilt the index; it covers {counted(done.commits, 'commit')}")
    if vanished:
        named = ", ".join(vanished[:_NAMES_MAX]) + (" …" if len(vanished) > _NAMES_MAX else "")
        say_warning(
            f"{counted(len(vanished), 'record')} vanished and not forgotten: {shown(named)}; "
            "layerstore repair writes back what has a copy, reindex --forget forgets them"
        )
