"""
Parts on disk: each rank's share of a joint save, until one rank commits the save.

A rank publishes its part in two steps. It first links a draft into the session's folder: only collections see drafts,
and they keep all objects that a draft refers to, which are durable already. Once the rank has checked that all of these
still exist, it renames the draft to a part, which is never withdrawn.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import LayerstoreError, StorageIO
from layerstore.format import part_name, seal_part, unseal_part
from layerstore.layout import Layout
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.parts import Part

_SESSION = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(?P<save>[0-9]{1,18})\.(?P<rank>[0-9]{1,9})(?P<draft>\.draft)?")


class PartStore:
    """The folder ``parts/``."""

    def __init__(self, layout: Layout, files: Files, *, store_id: str) -> None:
        self._layout = layout
        self._files = files
        self._store_id = store_id

    def open_session(self, session: str) -> None:
        """Make the folder of *session*."""
        self._files.make_directory(self._layout.parts)
        self._files.make_directory(self._layout.parts / session)

    def has_session(self, session: str) -> bool:
        """Whether the folder of *session* exists."""
        return self._files.is_directory(self._layout.parts / session)

    def sees_session(self, session: str) -> bool:
        """Whether the folder of *session* exists; waits, as a folder made by another rank may become visible late."""
        again = self._files.again(self._layout.parts / session)
        return self.has_session(session) or any(self.has_session(session) for _ in again)

    def ranks(self, session: str, save: int) -> set[int]:
        """Return the ranks that have a part of *save*; called many times a minute, so it reads only file names."""
        named = map(_NAME.fullmatch, self._files.names_unsorted(self._layout.parts / session))
        return {int(match["rank"]) for match in named if match and match["save"] == f"{save}" and not match["draft"]}

    def publish(self, part: Part) -> None:
        """Make *part* visible and durable, unless it exists already."""
        self._link(part, self._path(part.session, part.save, part.rank))

    def draft(self, part: Part) -> None:
        """Make a draft of *part*: durable, and visible only to collections."""
        self._link(part, self._draft(part.session, part.save, part.rank))

    def confirm(self, part: Part) -> None:
        """Turn the draft of *part* into a part; raises StorageIO if a collection has removed the draft."""
        place = part.session, part.save, part.rank
        self._files.rename(self._draft(*place), self._path(*place))

    def _link(self, part: Part, target: Path) -> None:
        if not self.has_session(part.session):
            self.open_session(part.session)  # a collection removed the idle folder
        with self._files.temporary(self._layout.tmp, seal_part(part, store_id=self._store_id)) as source:
            # If the target exists, it stays: the rank repeats its own work, so the parts are identical; or it reports a
            # failure, which must not replace its share.
            self._files.link_exclusive(source, target)
        self._files.sync_directory(target.parent)

    def find(self, session: str, save: int, rank: int) -> Part | None:
        """Return a part; None if it does not exist; raises IntegrityError if it is damaged."""
        return self._read(self._path(session, save, rank), session, save, rank)

    def _read(self, path: Path, session: str, save: int, rank: int) -> Part | None:
        data = self._files.read_if_there(path, size_bytes_max=RECORD_BYTES_MAX)
        if data is None:
            return None
        return unseal_part(data, name=part_name(session, save, rank), store_id=self._store_id)

    def listed(self) -> Iterator[str | Path]:
        """Yield the name of every session, and the path of everything in ``parts/`` that is not a session or part."""
        for session in self._files.names_there(self._layout.parts):
            folder = self._layout.parts / session
            if _SESSION.fullmatch(session) and self._files.is_directory(folder):
                yield from (folder / name for name in self._files.names_there(folder) if not _NAME.fullmatch(name))
                yield session
            elif self._files.exists(folder):
                yield folder

    def strangers(self) -> Iterator[Path]:
        """Yield the path of everything in ``parts/`` that is not named like a session or part."""
        return (entry for entry in self.listed() if isinstance(entry, Path))

    def of_session(self, session: str) -> list[Part]:
        """Return the parts and drafts of *session*; raises IntegrityError if any is damaged."""
        parts = (
            # A draft that was listed may have become a part since.
            self._read(path, session, save, rank) or self.find(session, save, rank)
            for path, save, rank in self._named(session)
        )
        return [part for part in parts if part is not None]

    def _named(self, session: str) -> Iterator[tuple[Path, int, int]]:
        """Yield each part and draft of *session*: its path, save and rank."""
        folder = self._layout.parts / session
        # List twice: a file renamed during a listing may be missing from it under both names.
        names = {name for _ in range(2) for name in self._files.names_unsorted(folder)}
        for path in (folder / name for name in sorted(names)):
            if (match := _NAME.fullmatch(path.name)) is not None:
                yield path, int(match["save"]), int(match["rank"])

    def all(self) -> Iterator[tuple[Path, Part | LayerstoreError]]:
        """Yield the path of every part and draft of every session, with the part, or the error if it cannot be read."""
        for session in (entry for entry in self.listed() if isinstance(entry, str)):
            for path, save, rank in self._named(session):
                try:
                    part = self._read(path, session, save, rank)
                except LayerstoreError as exc:
                    yield path, exc
                else:
                    if part is not None:  # otherwise it was removed in the meantime
                        yield path, part

    def modified_ns(self, session: str) -> int:
        """Return when *session* last changed, by the filesystem's clock."""
        folder = self._layout.parts / session
        paths = [folder, *(folder / name for name in self._files.names(folder))]
        return max((self._files.modified_ns(path) or 0 for path in paths), default=0)

    def remove_session(self, session: str, *, before_ns: int) -> None:
        """Remove the files of *session* that last changed before *before_ns*, and the folder if it is then empty."""
        folder = self._layout.parts / session
        for name in self._files.names(folder):
            modified_ns = self._files.modified_ns(folder / name)
            if modified_ns is not None and modified_ns < before_ns and self._files.is_file(folder / name):
                self._files.unlink(folder / name)
        self._files.remove_empty(folder)

    def withdraw(self, session: str, save: int, rank: int) -> None:
        """Remove the draft of a part, if it exists: an object that it refers to is gone, or the rank has failed."""
        self._files.unlink(self._draft(session, save, rank))

    def remove(self, session: str, save: int, *, world_size: int) -> None:
        """Remove the parts of a save that was committed or given up."""
        for rank in range(world_size):
            # A part that cannot be removed now is collected once the session has been idle for a day.
            self._files.discard(self._path(session, save, rank))

    def close_session(self, session: str, *, is_over: bool) -> None:
        """
        Remove the folder of *session* if it is empty, or if the session *is_over*: all ranks have finished writing.

        Until the session is over, a rank may still publish its part of a save that was already given up.
        """
        folder = self._layout.parts / session
        try:
            if self._files.is_directory(folder) and (is_over or not self._files.names(folder)):
                self._files.remove_tree(folder)
        except StorageIO:
            pass  # a collection will remove it

    def _path(self, session: str, save: int, rank: int) -> Path:
        return self._layout.root / part_name(session, save, rank)

    def _draft(self, session: str, save: int, rank: int) -> Path:
        path = self._path(session, save, rank)
        return path.with_name(f"{path.name}.draft")
