"""Filesystems of their own, mounted for a test: in a file by a loop, or in memory; filled up, made read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerstore.limits import MIB

SMALL = ("ext4", "xfs", "tmpfs")
"""Kinds that a test may fill up."""
_MAKE = {"ext4": ["mkfs.ext4", "-q", "-m", "0"], "xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"]}
_MAKE["vfat"] = ["mkfs.vfat"]
# XFS is not made smaller than 300 MiB; the file is sparse, and what fills it takes no blocks of its own.
_SIZE_BYTES = {"xfs": 300 * MIB, "btrfs": 300 * MIB}


@contextlib.contextmanager
def mounted(kind: str, place: Path, size_bytes: int | None = None) -> Iterator[Path]:
    """Mount a new filesystem of *kind* on the folder *place*; skip the test where that cannot be done."""
    place.mkdir(parents=True, exist_ok=True)
    image = place.with_name(f"{place.name}-image")
    size_bytes = size_bytes or _SIZE_BYTES.get(kind, 16 * MIB)
    commands: list[list[object]]
    if kind == "tmpfs":
        commands = [["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", place]]
    elif kind == "bindfs":
        commands = [["mkdir", image], ["bindfs", image, place]]
    else:
        image.touch()
        os.truncate(image, size_bytes)
        commands = [[*_MAKE[kind], image], ["mount", "-o", "loop", image, place]]
    if os.getuid() or not all(map(_runs, commands)):
        pytest.skip(f"no {kind} can be made and mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        if image.is_file():
            image.unlink()


def _runs(command: list[object]) -> bool:
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        return False
    return not subprocess.run(words, check=False, capture_output=True).returncode


def is_remounted(place: Path, *options: str) -> bool:
    """Mount what is at *place* with other *options*; return whether that is allowed here."""
    return _runs(["mount", "-o", ",".join(["remount", *options]), place])


def fill(place: Path, *, but_bytes: int) -> Path:
    """Fill a small filesystem to the last byte, but for *but_bytes*; return the file that does it."""
    ballast = place / "ballast"
    room = os.statvfs(place)
    with ballast.open("wb", buffering=0) as file:
        most = room.f_bavail * room.f_frsize - but_bytes - MIB // 2
        if most > 0:
            with contextlib.suppress(OSError):  # what filesystems keep for themselves is not known beforehand
                os.posix_fallocate(file.fileno(), 0, most)
        file.seek(0, os.SEEK_END)
        for size_bytes in (1 << 16, 1 << 12, 1):
            _write_until_full(file.fileno(), size_bytes)
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), max(0, file.tell() - but_bytes))
        os.fsync(file.fileno())
    return ballast


def _write_until_full(descriptor: int, size_bytes: int) -> None:
    try:
        while os.write(descriptor, b"x" * size_bytes):
            pass
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
