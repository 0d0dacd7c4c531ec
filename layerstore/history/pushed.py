"""``pushed.json``: what each remote had after the last push or pull. For people only; no decision depends on it."""

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
    Note that the remote at *url* has *commits*, and no longer has commits that are only in *before*.

    What another push has noted in the meantime stays. If the store cannot be written, warn instead.
    """

    def noted() -> bytes | None:
        pushed = pushed_to(repo)
        has = pushed.get(url, frozenset()).difference(before).union(commits)
        if pushed.get(url, frozenset()) == has:
            return None
        return _encoded({**pushed, url: has})

    try:
        repo.rewrite(repo.layout.pushed, noted)
    except (StorageIO, Locked) as exc:  # a read-only store, say
        warnings.warn(f"could not note what the remote has: {exc}", PushedNotice, stacklevel=3)


def forget_pushed(repo: Repository, url: str) -> bool:
    """Forget the remote at *url*; return whether anything was noted about it."""
    if url not in pushed_to(repo):
        return False

    def noted() -> bytes:
        return _encoded({remote: commits for remote, commits in pushed_to(repo).items() if remote != url})

    repo.rewrite(repo.layout.pushed, noted)
    return True


def _encoded(pushed: Mapping[str, Collection[CommitId]]) -> bytes:
    return json.dumps({remote: sorted(commits) for remote, commits in sorted(pushed.items())}).encode()
