"""
Contestants of the doctor's race on a filesystem that does not keep its word: the first argument says which.

    python -m tests.faults.cheating links FOLDER NUMBER
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path

from layerstore.check.probes import contest
from layerstore.disk import Files, NewFile
from layerstore.errors import StorageIO


class Linking(Files):
    """Gives a name that is taken to the next one."""

    def link_exclusive(self, source: Path, target: Path) -> bool:
        """Replace what is there."""
        with contextlib.suppress(FileExistsError):
            os.link(source, target)
        return True


class Creating(Files):
    """Creates what is there."""

    def create(self, path: Path, *, sync_ahead: bool = False) -> NewFile:
        """Create it once more."""
        if path.name.startswith("created"):
            path = path.with_name(f"{path.name}-{os.getpid()}")
        return super().create(path, sync_ahead=sync_ahead)


class Tearing(Files):
    """Replaces a file in pieces."""

    def rename(self, source: Path, target: Path) -> None:
        """Copy half of it."""
        shutil.copyfile(source, target)
        os.truncate(target, target.stat().st_size // 2)
        source.unlink()


class Vanishing(Files):
    """Lets a file that is replaced be missing for a moment."""

    def read(self, path: Path, *, size_bytes_max: int) -> bytes:
        """Look at the wrong moment."""
        raise StorageIO(f"cannot open {path}", errno=errno.ENOENT, filename=str(path))


CHEATS = {"links": Linking, "creates": Creating, "tears": Tearing, "vanishes": Vanishing}

if __name__ == "__main__":
    contest(CHEATS[sys.argv[1]](), Path(sys.argv[2]), int(sys.argv[3]), sys.stdin, sys.stdout)
