"""What remotes had when something was last pushed there, for people to see: ``pushed.json``. Nothing decides by it."""

import json
import warnings
from collections.abc import Iterable, Mapping

from layerstore.limits import BLOB_BYTES_MAX
from layerstore.model import CommitId
from layerstore.storage import Repository


class PushedNotice(UserWarning):
    """What was pushed is not known any more, or was removed before it was."""


def pushed_to(repo: Repository) -> Mapping[str, frozenset[CommitId]]:
    """Return the commits that each remote had, by its URL; a damaged note is told, and is as good as none."""
    path = repo.layout.pushed
    data = repo.files.read_if_there(path, size_bytes_max=BLOB_BYTES_MAX)
    if data is None:
        return {}
    try:
        return {url: frozenset(map(CommitId, names)) for url, names in json.loads(data).items()}
    except (ValueError, TypeError, AttributeError):
        warnings.warn(
            f"{path} is damaged, so what was pushed is not known; the next push writes it anew",
            PushedNotice,
            stacklevel=2,
        )
        return {}


def note_pushed(repo: Repository, url: str, commits: Iterable[CommitId]) -> None:
    """Note that the remote at *url* has *commits*."""
    found = {**pushed_to(repo), url: commits}
    text = json.dumps({url: sorted(names) for url, names in sorted(found.items())})
    with repo.files.temporary(repo.layout.tmp, text.encode()) as source:
        repo.files.rename(source, repo.layout.pushed)
