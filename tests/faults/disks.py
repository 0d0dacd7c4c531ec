"""Small filesystems for tests, real ones: made in a file, mounted by a loop, filled up, made read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from layerstore.limits import MIB
from tests.faults.harness import tmpfs

KINDS = ("ext4", "xfs", "tmpfs")
_MAKE = {"ext4": ["mkfs.ext4", "-q", "-m", "0"], "xfs": ["mkfs.xfs", "-q"]}
# XFS is not made smaller; the file is sparse, and what fills it takes no blocks of its own.
_SIZE_BYTES = {"ext4": 16 * MIB, "xfs": 300 * MIB, "tmpfs": 16 * MIB}


@contextlib.contextmanager
def disk(kind: str, folder: Path) -> Iterator[Path | None]:
    """Yield a folder below *folder* that is a small filesystem of its own; None where that is not allowed here."""
    mounted, image = folder / f"{kind}-disk", folder / f"{kind}-image"
    if kind == "tmpfs":
        with tmpfs(mounted, _SIZE_BYTES[kind]) as is_mounted:
            yield mounted if is_mounted else None
        return
    if os.getuid() or shutil.which(_MAKE[kind][0]) is None:
        yield None
        return
    mounted.mkdir(parents=True, exist_ok=True)
    image.touch()
    os.truncate(image, _SIZE_BYTES[kind])
    subprocess.run([*_MAKE[kind], os.fspath(image)], check=True, capture_output=True)
    done = subprocess.run(["mount", "-o", "loop", image, mounted], check=False, capture_output=True)
    try:
        yield None if done.returncode else mounted
    finally:
        if not done.returncode:
            subprocess.run(["umount", "-l", mounted], check=True)
        image.unlink()


def fill(mounted: Path, *, but_bytes: int) -> Path:
    """Fill a small filesystem to the last byte, but for *but_bytes*; return the file that does it."""
    ballast = mounted / "ballast"
    room = os.statvfs(mounted)
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


def remounted(mounted: Path, *options: str) -> bool:
    """Mount what is at *mounted* with other *options*; return whether that is allowed here."""
    return not subprocess.run(["mount", "-o", ",".join(["remount", *options]), mounted], check=False).returncode
