"""
The single file that a verb writes for people: it appears whole or not at all.

It replaces nothing but an older one of its own kind, which is known by how it begins.
"""

import secrets
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import AlreadyExists
from layerstore.ops.target import placed, understood
from layerstore.storage.rooms import Rooms


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTarget:
    """Where a file is to be."""

    path: Path
    older: tuple[int, ...] | None
    """The identity of an older one of its kind that is there; None where nothing is."""


def checked_file(rooms: Rooms, out: Path, *, what: str, begins: bytes) -> FileTarget:
    """
    Return where *out* is, if a file may be written there; *what* it is, with its article, *begins* so.

    Raises:
        InvalidInput: It is in the store, around the store, or no path for a file.
        AlreadyExists: Something else is there, which is never replaced.
    """
    with understood(out):
        target = placed(rooms, out, what="place")
        if not target.is_symlink() and not target.exists():
            return FileTarget(path=target, older=None)
        if target.is_symlink() or not target.is_file() or not _begins(rooms, target, begins):
            raise AlreadyExists(
                f"{out} is there and is not {what}; nothing was changed",
                hint="choose another -o, or remove it by hand",
            )
        older = rooms.files.identity(target)
    return FileTarget(path=target, older=older)


def _begins(rooms: Rooms, path: Path, begins: bytes) -> bool:
    with rooms.files.open(path) as file:
        return file.size_bytes >= len(begins) and file.read_at(0, len(begins)) == begins


def write_file(rooms: Rooms, target: FileTarget, data: bytes) -> None:
    """
    Make *target* a file of *data*; whoever opens it meanwhile finds the older one, whole.

    Raises:
        AlreadyExists: Something came there since it was looked at.
        StorageIO: The disk refused; what was there is as before.
    """
    files, path = rooms.files, target.path
    files.make_directories(path.parent)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with files.create(partial) as file:
            file.write_at(0, data)
            file.sync()
        if target.older is not None and files.identity(path) == target.older:
            files.rename(partial, path)
        elif not files.link_exclusive(partial, path):
            raise AlreadyExists(
                f"{path} has come to be there meanwhile; nothing was changed", hint="repeat the command"
            )
        files.sync_directory(path.parent)
    finally:
        files.discard(partial)
