"""Pointer files, and what lies beside them, on their way to the disk."""

import secrets
from pathlib import Path

from layerstore.storage.files import Files
from layerstore.zero3 import Pointer, pointer_bytes


def write_pointer(files: Files, path: Path, pointer: Pointer) -> None:
    """Let *path* be a pointer."""
    write_whole(files, path, pointer_bytes(pointer, stem=path.stem))


def write_whole(files: Files, path: Path, data: bytes) -> None:
    """Let *path* hold *data*: whatever was there is replaced whole, and other ranks may do the same."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    with files.create(partial) as file:
        file.write_at(0, data)
    files.rename(partial, path)
