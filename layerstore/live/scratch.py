"""Temporary folders for libraries that can only read or write files; never part of a store."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a new folder, removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix="layerstore-") as folder:
        yield Path(folder)


def lasting_scratch() -> Path:
    """Return a new folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="layerstore-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def put(path: Path, data: bytes = b"") -> Path:
    """Write *data* to *path*, below a scratch folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
