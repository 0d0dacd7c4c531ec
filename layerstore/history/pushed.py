"""``pushed.json``: what each remote had after the last push. For people only; no decision depends on it."""

import json
import warnings
from collections.abc import Collection, Mapping

from layerstore.errors import Locked, StorageIO
from layerstore.json_text import parse_json
from layerstore.layout import OBJECT_ID
from layerstore.limits import PUSHED_BYTES_MAX
from layerstore.model import CommitId
from layerstore.redact import shown_url
from layerstore.storage import Repository


class PushedNotice(UserWarning):
    """The note of what was pushed is lost, or a commit was removed before it was pushed."""


def pushed_to(repo: Repository) -> Mapping[str, frozenset[CommitId]]:
    """Return the commits that each remote had, by URL; warn about a damaged note and ignore it."""
    path = repo.layout.pushed
    data = repo.files.read_if_there(path, size_bytes_max=PUSHED_BYTES_MAX)
    if data is None:
        return {}
    try:
        return {shown_url(url): frozenset(map(_commit, names)) for url, names in parse_json(data).items()}
    except (ValueError, TypeError, AttributeError):
        warnings.warn(
            f"{path} is damaged, so what was pushed is not known; the next push writes it anew",
            PushedNotice,
            stacklevel=2,
        )
        return {}


def _commit(name: str) -> CommitId:
    if not OBJECT_ID.fullmatch(name):
        raise ValueError(f"{name} is not a commit")
    return CommitId(name)


def note_pushed(
    repo: Repository, url: str, commits: Collection[CommitId], *, before: Collection[CommitId] = ()
) -> None:
    """
    Note that the remote at *url* has *commits*, and no longer those that were noted *before* the push.

    What another push has noted meanwhile stays. A store that cannot be written to gets a warning and no note.
    """

    def noted() -> bytes | None:
        pushed = pushed_to(repo)
        has = pushed.get(url, frozenset()).difference(before).union(commits)
        if pushed.get(url) == has:
            return None
        return json.dumps({remote: sorted(names) for remote, names in sorted({**pushed, url: has}.items())}).encode()

    try:
        repo.rewrite(repo.layout.pushed, noted)
    except (StorageIO, Locked) as exc:  # a read-only store, say
        warnings.warn(f"what was pushed is not noted here: {exc}", PushedNotice, stacklevel=3)


def note_removed(repo: Repository, url: str, commits: Collection[CommitId]) -> None:
    """Note that the remote at *url* no longer has *commits*, if anything was noted of it."""
    if url in pushed_to(repo):
        note_pushed(repo, url, (), before=commits)
