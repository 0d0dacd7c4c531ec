"""The error for a path that is not a store; its hint names a store below the path, or a command that makes one."""

import contextlib
from pathlib import Path

from layerstore.disk import Files
from layerstore.errors import NoStore, StorageIO
from layerstore.layers import typed
from layerstore.layout import Layout


def no_store_at(path: Path, layout: Layout, files: Files) -> NoStore:
    """Return the error for a user who expected a store at *path*, which is the root of *layout*."""
    inside = _store_inside(path, layout, files)
    return NoStore(
        f"there is no store at {path}{': a store is a folder, not a file' if _is_file(layout.root, files) else ''}",
        hint=f"name the one inside it: {inside}" if inside else _makes_one(path, layout, files),
        path=str(path),
        inside=inside,
        can_be_made=inside is None,
    )


def _is_file(path: Path, files: Files) -> bool:
    with contextlib.suppress(StorageIO):
        return files.is_file(path)
    return False


def _store_inside(path: Path, layout: Layout, files: Files) -> Path | None:
    """Return the store inside *path* that the user may have meant; None if no store is found."""
    with contextlib.suppress(StorageIO):  # an unreadable folder yields no hint
        for name in ("store", ".layerstore"):
            if files.exists(layout.root / name / layout.identity.name):
                return path / name
    return None


def _makes_one(path: Path, layout: Layout, files: Files) -> str:
    """Return a hint on making a store at *path*, or elsewhere if `init` would refuse *path*."""
    with contextlib.suppress(StorageIO):
        if not files.exists(layout.root) or (files.is_directory(layout.root) and not files.names(layout.root)):
            return f"layerstore init {typed(str(path))}, or name yours"
    return "layerstore init makes one in a new or empty folder, or name yours"
