"""Pointer files on their way to the disk."""

import secrets
from pathlib import Path

from layerstore.storage.files import Files
from layerstore.zero3.pointers import Pointer, pointer_bytes


def write_pointer(files: Files, path: Path, pointer: Pointer) -> None:
    """Let *path* be a pointer; whatever was there is replaced whole."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(4)}")
    with files.create(partial) as file:
        file.write_at(0, pointer_bytes(pointer, stem=path.stem))
    files.rename(partial, path)
