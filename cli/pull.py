"""``layerstore pull``: fetch what a remote has."""

from layerstore.cli.commands import About
from layerstore.cli.options import AsJson, StorePath, opened
from layerstore.cli.progress import shown_progress
from layerstore.cli.push import Words, print_transferred, remote_and_references
from layerstore.cli.render import print_line, with_store
from layerstore.units import short_id

ABOUT = About("Elsewhere")


def pull(words: Words = None, *, store: StorePath = None, as_json: AsJson = False) -> None:
    """
    Fetch commits and pins that a remote has.

    Fetches all that this store lacks, or only the references that are given.
    All bytes are checked against their names before a commit becomes visible.
    A commit in this store's trash is fetched only if its reference is given.

    \b
    Examples:
      layerstore pull
      layerstore pull origin sft@200
    """
    with opened(store) as opened_store, shown_progress(as_json=as_json) as progress:
        name, refs = remote_and_references(opened_store, words or [], from_here=False)
        pulled = opened_store.pull(name, refs=refs, progress=progress)
    print_transferred(
        pulled, refs, as_json=as_json, verb="fetched", size_bytes=pulled.bytes_received, is_all=not pulled.dropped
    )
    if pulled.dropped and not as_json:
        is_one = len(pulled.dropped) == 1
        back = f"undrop {short_id(pulled.dropped[0])} brings it back" if is_one else "log --dropped lists them"
        were = "remote commit was" if is_one else "remote commits were"
        print_line(f"{len(pulled.dropped):,} {were} dropped here: {with_store(f'layerstore {back}')}")
