"""The paths inside a store."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from layerstore.errors import InvalidInput

if TYPE_CHECKING:  # building the model's classes would take too long for shell completion
    from layerstore.model import CommitId, ObjectId, StrPath

IDENTITY = "store.json"
OBJECT_ID = re.compile(r"[0-9a-f]{32}")
MARK_PREFIX = ".layerstore-"
"""Prefix of short-lived files that ranks make in a store's future folder, to find out which ranks share that folder."""
RECORD_NAME = re.compile(r"(?P<step>0|[1-9][0-9]{0,18})\.(?P<id>[0-9a-f]{32})")


class Layout:
    """The paths of the store at *root*, which was resolved once, on opening."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = root / IDENTITY
        """The file that makes a folder a store."""
        self.objects = root / "objects"
        """Immutable content, in 256 folders by the first two digits of the id."""
        self.commits = root / "commits"
        """One folder per run, one file per record."""
        self.pins = root / "pins"
        """One file per pin."""
        self.index = root / "manifest"
        """The index, unless it lives on another disk."""
        self.parts = root / "parts"
        """Ranks' shares of incomplete commits."""
        self.stats = root / "stats"
        """The savers' own timings: advisory, never truth."""
        self.tmp = root / "tmp"
        """Files that do not have their final names yet."""
        self.locks = root / "locks"
        """Lock files. No promise depends on the locks, since some filesystems have none."""
        self.gc = root / "gc"
        """Working files of collections."""
        self.aside = self.gc / "aside"
        """Objects about to be removed."""
        self.trash = root / "trash"
        """Files that users dropped or replaced, or that repairs moved away."""
        self.dropped = self.trash / "commits"
        """The records in the trash, in one folder per run."""
        self.sparse = root / "sparse"
        """Partially fetched objects of a remote."""
        self.remotes = root / "remotes.json"
        """The names and URLs of remotes."""
        self.pushed = root / "pushed.json"
        """Which commits each remote had after the last push or pull: advisory, never truth."""
        self.partial = root / "partial.json"
        """Which remote has the objects that a partial clone lacks; other stores do not have this file."""
        self.migrating = root / "migrating"
        """Working files of an unfinished migration."""
        self.backups = root / "backups"
        """What migrations have replaced, one folder a migration; layerstore never removes anything from it."""
        self.gc_lock = self.locks / "gc.lock"
        """The lock file that prevents two concurrent collections."""
        self.folders = (
            self.objects,
            self.commits,
            self.pins,
            self.trash,
            self.parts,
            self.stats,
            self.tmp,
            self.locks,
            self.gc,
            self.aside,
        )
        """Every folder that ``init`` makes."""

    def migrated(self, number: int) -> Path:
        """Return the folder where a migration to format *number* prepares its files."""
        return self.migrating / f"format-{number}"

    def object(self, object_id: "ObjectId") -> Path:
        """Return the path of an object; raises InvalidInput if *object_id* is not an id."""
        return _object_in(self.objects, object_id)

    def object_name(self, object_id: str) -> str:
        """Return an object's path inside the store, for messages; *object_id* may be malformed."""
        return f"{self.objects.name}/{object_id[:2]}/{object_id}"

    def run(self, run: str) -> Path:
        """Return the folder of a run's records; *run* is used as it is, since a valid name is a safe path component."""
        return self.commits / run

    def attempt_lock(self, run: str, attempt: int) -> Path:
        """Return the lock file of the job that saves *attempt* of *run*."""
        return self.locks / f"saver-{run}-{attempt}.lock"

    def record(self, run: str, step: int, commit_id: "CommitId") -> Path:
        """Return the path of a record."""
        return self.run(run) / f"{step}.{commit_id}"

    def pin(self, name: str) -> Path:
        """Return the path of a pin."""
        return self.pins / name

    def name(self, path: Path) -> str:
        """Return *path* relative to the store, as used in envelopes and messages."""
        return path.relative_to(self.root).as_posix()


@lru_cache(1 << 13)  # a save asks five times for the path of each of its objects
def _object_in(objects: Path, object_id: "ObjectId") -> Path:
    if not OBJECT_ID.fullmatch(object_id):
        raise InvalidInput(f"{object_id!r} is not an object id", hint="ids are 32 lower-case hex digits")
    return objects.joinpath(object_id[:2], object_id)


def is_url(text: str) -> bool:
    """Whether *text* is the URL of a remote rather than a path or a name."""
    return "://" in text


def folder_of(path: "StrPath") -> Path:
    """Return *path*, the path of a folder, as a `Path`; raises InvalidInput for a URL, or a `Path` made from a URL."""
    if re.match(r"[a-z0-9]+:/", str(path), re.IGNORECASE):
        raise InvalidInput(
            f"{path} is a URL, and this is for a store in a folder",
            hint="layerstore verify checks a store in a bucket, and layerstore clone brings it to a disk",
        )
    return Path(path)


def place(named: "StrPath") -> str:
    """Return *named*, a folder or URL, as text; a folder becomes its absolute path."""
    return named if isinstance(named, str) and is_url(named) else str(folder_of(named).absolute())


def url_of(place: str) -> str:
    """Return the URL of *place*, an absolute path or a URL."""
    return place if is_url(place) else Path(place).as_uri()


def layout_at(path: Path) -> Layout:
    """Return the layout of the store at *path*, with links resolved; raises InvalidInput if it is not a path."""
    try:
        return Layout(Path(os.path.realpath(path)))
    except ValueError as exc:  # a NUL
        raise InvalidInput(f"{path} is not a path: {exc}", hint="name the folder of a store") from exc
