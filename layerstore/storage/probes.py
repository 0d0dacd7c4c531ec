"""
What a filesystem can do, tried out: in a folder of its own, through the seam that the store writes through.

Each probe returns what it found; what that means is said in ``ops/doctor.py``.
"""

import contextlib
import errno as errnos
import math
import os
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import StorageIO
from layerstore.limits import NAME_BYTES_MAX, STREAM_BYTES
from layerstore.storage.environment import Environment, ManifestUnusable
from layerstore.storage.files import Files, WeakDurability
from layerstore.storage.kernel import clone
from layerstore.storage.stream import Stream

_SYNCS = 3
_SPEED_SECONDS = 2.0
_SPEED_FILE_BYTES = 8 * STREAM_BYTES
_SPEED_BYTES_MAX = 32 * _SPEED_FILE_BYTES
_CLOCK_LOOKS = 4
# The finest of these that all times are multiples of.
_GRANULARITIES_NS = (2 * 10**9, 10**9, 10**6, 10**3, 100)
_NO_LINKS = {errnos.EPERM, errnos.EOPNOTSUPP, errnos.ENOSYS, errnos.EMLINK}


@contextlib.contextmanager
def scratch(files: Files, parent: Path, *, prefix: str = "doctor") -> Iterator[Path]:
    """Yield a new folder below *parent* that is gone afterwards, whatever happens but a kill."""
    folder = parent / f"{prefix}-{secrets.token_hex(8)}"
    files.make_directory(folder, durable=False)
    try:
        yield folder
    finally:
        files.remove_tree(folder)


def _write(files: Files, path: Path, data: bytes) -> Path:
    with files.create(path) as file:
        file.write_at(0, data)
    return path


def creates_exclusively(files: Files, folder: Path) -> bool:
    """Whether a file that is there cannot be created."""
    _write(files, folder / "once", b"first")
    try:
        files.create(folder / "once").close()
    except StorageIO as exc:
        return exc.errno == errnos.EEXIST
    return False


def links_exclusively(files: Files, folder: Path) -> bool | None:
    """Whether a name that is taken is refused; None where neither hard links nor renames can tell."""
    first, second = (_write(files, folder / name, name.encode()) for name in ("first", "second"))
    try:
        is_new = files.link_exclusive(first, folder / "linked")
    except StorageIO as exc:
        if exc.errno in _NO_LINKS:
            return None
        raise
    again = files.link_exclusive(second, folder / "linked")
    return is_new and not again and files.read(folder / "linked", size_bytes_max=64) == b"first"


def renames_over(files: Files, folder: Path) -> bool:
    """Whether a rename replaces the file that had the name, and leaves nothing at the old one."""
    old, new = _write(files, folder / "old", b"old"), _write(files, folder / "new", b"new")
    files.rename(new, old)
    return files.read(old, size_bytes_max=64) == b"new" and not files.exists(new)


def shares_blocks(files: Files, folder: Path) -> bool:
    """Whether a copy can share the blocks of its source (reflink)."""
    source = _write(files, folder / "shared", os.urandom(64 * 1024))
    with files.open(source) as file, files.create(folder / "clone") as copy:
        return clone(file.fd, copy.fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncs:
    """What fsync takes, at best, and whether there is one for folders."""

    file_seconds: float
    folder_seconds: float
    has_folders: bool


def syncs(files: Files, folder: Path) -> Syncs:
    """Sync files and their folder a few times."""
    file_seconds, folder_seconds, has_folders = [], [], True
    for number in range(_SYNCS):
        with files.create(folder / f"synced-{number}") as file:
            file.write_at(0, os.urandom(4096))
            started = time.perf_counter()
            file.sync()
        file_seconds.append(time.perf_counter() - started)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            started = time.perf_counter()
            files.sync_directory(folder)
        folder_seconds.append(time.perf_counter() - started)
        has_folders = has_folders and not any(issubclass(each.category, WeakDurability) for each in caught)
    return Syncs(file_seconds=min(file_seconds), folder_seconds=min(folder_seconds), has_folders=has_folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast files are written, from the first byte until they are durable."""

    written_bytes: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Return the speed."""
        return self.written_bytes / self.seconds


def write_speed(files: Files, folder: Path) -> Speed:
    """Write files as saves in training do, past the kernel's cache, for some seconds or until there are enough."""
    data = os.urandom(STREAM_BYTES)  # nothing that a disk could make smaller
    written, started, seconds = 0, time.perf_counter(), 0.0
    while seconds < _SPEED_SECONDS and written < _SPEED_BYTES_MAX:
        with files.create(folder / f"written-{written}") as file:
            with contextlib.closing(Stream(file)) as stream:
                for offset in range(0, _SPEED_FILE_BYTES, STREAM_BYTES):
                    stream.write_at(offset, data)
                stream.finish()
            file.sync()
        files.sync_directory(folder)
        written += _SPEED_FILE_BYTES
        seconds = time.perf_counter() - started
    return Speed(written_bytes=written, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The filesystem's clock."""

    ahead_seconds: float
    """Of this host's."""
    granularity_ns: int
    """What its times are multiples of."""


def clock(files: Files, folder: Path) -> Clock:
    """Compare the filesystem's clock with this host's."""
    path = _write(files, folder / "touched", b"")
    times, ahead = [], []
    for _ in range(_CLOCK_LOOKS):
        files.touch(path)
        times.append(files.modified_ns(path) or 0)
        ahead.append(times[-1] / 1e9 - time.time())
        time.sleep(0.005)
    common = math.gcd(*times)
    granularity_ns = next((each for each in _GRANULARITIES_NS if common % each == 0), 1)
    return Clock(ahead_seconds=max(ahead), granularity_ns=granularity_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Which names the filesystem can tell apart."""

    has_case: bool
    """Whether it tells upper from lower case."""
    has_long: bool
    """Whether a name may be as long as that of a run."""


def names(files: Files, folder: Path) -> Names:
    """Try names that differ by case alone, and one that is as long as they come."""
    _write(files, folder / "name", b"")
    has_case = not files.exists(folder / "NAME")
    try:
        _write(files, folder / ("n" * NAME_BYTES_MAX), b"")
    except StorageIO as exc:
        if exc.errno != errnos.ENAMETOOLONG:
            raise
        return Names(has_case=has_case, has_long=False)
    return Names(has_case=has_case, has_long=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Who may do what."""

    new_file: int
    """The mode of a file made now."""
    new_folder: int
    is_open_to_all: bool
    """Whether anybody may write to the folder that was asked about."""
    is_of_another: bool
    """Whether it is another user's."""


def modes(files: Files, folder: Path, *, of: Path | None) -> Modes:
    """Look at the modes that new files get, and at those of the folder *of*, if it is there."""
    path = _write(files, folder / "mode", b"")
    state = None if of is None else of.stat()
    return Modes(
        new_file=stat.S_IMODE(path.stat().st_mode),
        new_folder=stat.S_IMODE(folder.stat().st_mode),
        is_open_to_all=state is not None and bool(state.st_mode & stat.S_IWOTH),
        is_of_another=state is not None and state.st_uid != os.geteuid(),
    )


def index_problem(folder: Path) -> str | None:
    """Make an index in *folder*, write to it and read it again; return why that is not possible, if it is not."""
    try:
        environment = Environment(folder / "index")
        try:
            environment.change(lambda transaction: transaction.put(b"key", b"value"))
            with environment.reading() as transaction:
                return None if transaction.get(b"key") == b"value" else "what was written is not read again"
        finally:
            environment.close()
    except ManifestUnusable as exc:
        return str(exc)
