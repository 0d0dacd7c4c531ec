"""
Probes of a filesystem's abilities, in a folder of their own, through the same `Files` as the store's writes.

Each probe yields findings: the result, and what it means for a store.
"""

import contextlib
import errno as errnos
import os
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerstore.disk import Files, Mount, WeakDurability, open_lock_file, try_flock
from layerstore.errors import StorageIO
from layerstore.limits import NAME_BYTES_MAX
from layerstore.units import size

ELSEWHERE = "choose another filesystem"

_SYNCS = 3  # only the fastest is reported: the others may have waited for another program's data
_CLOCK_LOOKS = 4
_SKEW_SECONDS_MAX = 5 * 60.0
_FREE_BYTES_MIN = 1 << 30
# A save of 80 layers on 64 ranks is some ten thousand files.
_FREE_FILES_MIN = 100_000
_NO_LINKS = {errnos.EPERM, errnos.EOPNOTSUPP, errnos.ENOSYS, errnos.EMLINK}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Literal["ok", "note", "problem"]
    """A *problem* breaks a promise; a *note* does not."""
    text: str
    hint: str | None = None


def _promise(check: str, is_kept: bool, kept: str, broken: str) -> Finding:
    return Finding(check, "ok", kept) if is_kept else Finding(check, "problem", broken, ELSEWHERE)


@contextlib.contextmanager
def scratch(files: Files, parent: Path) -> Iterator[Path]:
    """Yield a new folder below *parent*; it is removed afterwards whatever happens, short of a kill."""
    folder = parent / f"doctor-{secrets.token_hex(8)}"
    files.make_directory(folder, durable=False)
    try:
        yield folder
    finally:
        files.remove_tree(folder)


def _write(files: Files, path: Path, data: bytes) -> Path:
    with files.create(path) as file:
        file.write_at(0, data)
    return path


def _creates(files: Files, path: Path) -> bool:
    """Create *path*; return whether it was new."""
    try:
        files.create(path).close()
    except StorageIO as exc:
        if exc.errno != errnos.EEXIST:
            raise
        return False
    return True


def modes(files: Files, folder: Path, *, root: Path) -> Iterator[Finding]:
    """Check the modes that new files get, and those of the folder *root*, if it exists."""
    file = _write(files, folder / "mode", b"").stat()
    text = f"possible; new files have the mode {stat.S_IMODE(file.st_mode):04o}, "
    text += f"new folders {stat.S_IMODE(folder.stat().st_mode):04o}"
    state = root.stat() if root.is_dir() else None
    if state is not None and state.st_mode & stat.S_IWOTH:
        hint = "checksums find accidents, not deliberate changes: make a folder of your own in it"
        yield Finding("writing", "note", f"{text}; but anybody may write here", hint)
    elif state is not None and state.st_uid != os.geteuid():
        hint = "a store that several share needs a common group, the setgid bit on its folders and umask 002 for all"
        yield Finding("writing", "note", f"{text}; the folder is another user's", hint)
    else:
        yield Finding("writing", "ok", text)


def exclusive_create(files: Files, folder: Path) -> Iterator[Finding]:
    """Try to create a file that exists."""
    is_kept = _creates(files, folder / "once") and not _creates(files, folder / "once")
    kept, broken = "an existing file is not created again", "an existing file is created again"
    yield _promise("exclusive create", is_kept, kept, broken)


def hard_links(files: Files, folder: Path) -> Iterator[Finding]:
    """Try to link to a name that is taken."""
    first, second = (_write(files, folder / name, name.encode()) for name in ("first", "second"))
    try:
        is_new = files.link_exclusive(first, folder / "linked")
    except StorageIO as exc:
        if exc.errno not in _NO_LINKS:
            raise
        yield Finding("hard links", "problem", "neither they nor renames protect a name that is taken", ELSEWHERE)
        return
    again = files.link_exclusive(second, folder / "linked")
    is_kept = is_new and not again and files.read(folder / "linked", size_bytes_max=64) == b"first"
    kept, broken = "a link does not replace a file", "a link replaces a file"
    yield _promise("hard links", is_kept, kept, broken)


def renames(files: Files, folder: Path) -> Iterator[Finding]:
    """Check that a rename replaces the file at the new name and leaves nothing at the old name."""
    old, new = _write(files, folder / "old", b"old"), _write(files, folder / "new", b"new")
    files.rename(new, old)
    is_kept = files.read(old, size_bytes_max=64) == b"new" and not files.exists(new)
    yield _promise("rename", is_kept, "replaces a file", "does not replace a file")


def fsync(files: Files, folder: Path) -> Iterator[Finding]:
    """Sync files and their folder a few times."""
    file_seconds, folder_seconds = [], []
    with warnings.catch_warnings(record=True) as caught:
        # Record the warning even if this process has been warned before.
        warnings.simplefilter("always")
        for number in range(_SYNCS):
            with files.create(folder / f"synced-{number}") as file:
                file.write_at(0, os.urandom(4096))
                started = time.perf_counter()
                file.sync()
            file_seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
            files.sync_directory(folder)
            folder_seconds.append(time.perf_counter() - started)
    times = f"file {min(file_seconds) * 1000:.2f} ms, folder {min(folder_seconds) * 1000:.2f} ms"
    if any(issubclass(warning.category, WeakDurability) for warning in caught):
        text = f"{times}, but folders cannot be synced: a power cut may undo what was reported as saved"
        yield Finding("fsync", "problem", text, f"{ELSEWHERE} for what must survive a power cut")
    else:
        yield Finding("fsync", "ok", times)


def reflink(files: Files, folder: Path) -> Iterator[Finding]:
    """Check whether a copy can share the blocks of its source."""
    source = _write(files, folder / "shared", os.urandom(64 * 1024))
    with files.open(source) as file, files.create(folder / "clone") as copy:
        is_shared = copy.clone(file)
    text = "works: compose shares blocks with the store" if is_shared else "none: compose copies"
    yield Finding("reflink", "ok", text)


def names(files: Files, folder: Path) -> Iterator[Finding]:
    """Try names that differ only in case, and one of the greatest length allowed for a run's name."""
    _write(files, folder / "name", b"")
    odd = []
    if files.exists(folder / "NAME"):
        odd.append("upper and lower case are not distinguished: runs that differ only in case become one")
    try:
        _write(files, folder / ("n" * NAME_BYTES_MAX), b"")
    except StorageIO as exc:
        if exc.errno != errnos.ENAMETOOLONG:
            raise
        odd.append("long names are refused: keep the names of runs and pins short")
    yield from (Finding("names", "note", text) for text in odd)
    if not odd:
        yield Finding("names", "ok", "long names work, and case is distinguished")


def clock(files: Files, folder: Path) -> Iterator[Finding]:
    """Compare the filesystem's clock with this host's."""
    path = _write(files, folder / "touched", b"")
    ahead = []
    for _ in range(_CLOCK_LOOKS):
        files.touch(path)
        # Each difference is too small, by a clock tick and by the duration of the call: the greatest is most accurate.
        ahead.append((files.modified_ns(path) or 0) / 1e9 - time.time())
        time.sleep(0.005)
    skew_seconds = abs(max(ahead))
    text = f"the filesystem's differs from this host's by {skew_seconds:.2f} s"
    if skew_seconds > _SKEW_SECONDS_MAX:
        hint = "ages are measured by the filesystem's clock, so nothing is lost; but the times that log shows are off"
        yield Finding("clock", "note", text, hint)
    else:
        yield Finding("clock", "ok", text)


def space(files: Files, folder: Path) -> Iterator[Finding]:
    """Check how many more bytes and files the filesystem has room for."""
    room = files.room(folder)
    files_free = "any number of files" if room.free_files is None else f"{room.free_files:,} more files"
    text = f"{size(room.free_bytes)} of {size(room.total_bytes)} free, {files_free}; a quota may allow less"
    has_few_files = room.free_files is not None and room.free_files < _FREE_FILES_MIN
    if room.free_bytes < _FREE_BYTES_MIN or has_few_files:
        hint = "layerstore gc frees what nothing needs; layerstore stats shows what is stored"
        yield Finding("space", "note", text, hint)
    else:
        yield Finding("space", "ok", text)


def locks(folder: Path, mount: Mount | None) -> Iterator[Finding]:
    """Check whether an flock keeps others out; flock treats two open files like two processes."""
    path = folder / "locked"
    with ExitStack() as stack:
        first, second = open_lock_file(path), open_lock_file(path)
        stack.callback(os.close, second)
        with ExitStack() as held:
            held.callback(os.close, first)
            is_there = try_flock(first, path) is not None
            got_meanwhile = try_flock(second, path)
        got_afterwards = try_flock(second, path)
    if is_there and got_afterwards and not got_meanwhile:
        text = "flock keeps other processes out, and lets them in afterwards"
        if mount is not None and mount.is_network:
            text += "; whether it reaches other hosts depends on the mount"
        yield Finding("locks", "ok", text)
    else:
        flock = "does not keep others out" if is_there else "is absent"
        yield Finding("locks", "note", f"flock {flock}: two commands may do the same work, and harm nothing")
