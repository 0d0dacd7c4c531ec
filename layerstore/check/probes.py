"""
Probes of a filesystem's abilities, in a folder of their own, through the same seam as the store's writes.

Each probe yields findings: the result, and what it means for a store.
"""

import contextlib
import errno as errnos
import json
import os
import secrets
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from layerstore.disk import Files, Mount, Stream, WeakDurability, open_lock_file, try_flock
from layerstore.errors import IntegrityError, LayerstoreError, StorageIO
from layerstore.limits import NAME_BYTES_MAX, STREAM_BYTES
from layerstore.units import size

ELSEWHERE = "choose another filesystem"

_SYNCS = 3
_SPEED_SECONDS = 2.0
_SPEED_FILE_BYTES = 8 * STREAM_BYTES
_SPEED_BYTES_MAX = 32 * _SPEED_FILE_BYTES
_CLOCK_LOOKS = 4
_SKEW_SECONDS_MAX = 5 * 60.0
_FREE_BYTES_MIN = 1 << 30
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
def scratch(files: Files, parent: Path, *, prefix: str = "doctor") -> Iterator[Path]:
    """Yield a new folder below *parent*; it is removed afterwards whatever happens, short of a kill."""
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


def _creates(files: Files, path: Path) -> bool:
    """Create *path*; return whether it was new."""
    try:
        files.create(path).close()
    except StorageIO as exc:
        if exc.errno != errnos.EEXIST:
            raise
        return False
    return True


def modes(files: Files, folder: Path, *, of: Path) -> Iterator[Finding]:
    """Check the modes that new files get, and those of the folder *of*, if it exists."""
    file = _write(files, folder / "mode", b"").stat()
    text = f"possible; new files have the mode {stat.S_IMODE(file.st_mode):04o}, "
    text += f"new folders {stat.S_IMODE(folder.stat().st_mode):04o}"
    state = of.stat() if of.is_dir() else None
    if state is not None and state.st_mode & stat.S_IWOTH:
        hint = "checksums find accidents, not whoever changes a store on purpose: make a folder of your own in it"
        yield Finding("writing", "note", f"{text}; but anybody may write here", hint)
    elif state is not None and state.st_uid != os.geteuid():
        hint = "a store that several share needs a common group, the setgid bit on its folders and umask 002 for all"
        yield Finding("writing", "note", f"{text}; the folder is another user's", hint)
    else:
        yield Finding("writing", "ok", text)


def exclusive_create(files: Files, folder: Path) -> Iterator[Finding]:
    """Try to create a file that exists."""
    is_kept = _creates(files, folder / "once") and not _creates(files, folder / "once")
    kept, broken = "a file that is there is not created again", "a file that is there is created again"
    yield _promise("exclusive create", is_kept, kept, broken)


def hard_links(files: Files, folder: Path) -> Iterator[Finding]:
    """Try to link to a name that is taken."""
    first, second = (_write(files, folder / name, name.encode()) for name in ("first", "second"))
    try:
        is_new = files.link_exclusive(first, folder / "linked")
    except StorageIO as exc:
        if exc.errno not in _NO_LINKS:
            raise
        yield Finding("hard links", "problem", "neither they nor renames keep a name that is taken", ELSEWHERE)
        return
    again = files.link_exclusive(second, folder / "linked")
    is_kept = is_new and not again and files.read(folder / "linked", size_bytes_max=64) == b"first"
    kept, broken = "a name that is taken is not given again", "a name that is taken is given again"
    yield _promise("hard links", is_kept, kept, broken)


def renames(files: Files, folder: Path) -> Iterator[Finding]:
    """Try whether a rename replaces the file at the new name and leaves nothing at the old one."""
    old, new = _write(files, folder / "old", b"old"), _write(files, folder / "new", b"new")
    files.rename(new, old)
    is_kept = files.read(old, size_bytes_max=64) == b"new" and not files.exists(new)
    yield _promise("rename", is_kept, "replaces a file", "does not replace a file")


def fsync(files: Files, folder: Path) -> Iterator[Finding]:
    """Sync files and their folder a few times."""
    file_seconds, folder_seconds = [], []
    with warnings.catch_warnings(record=True) as caught:
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
    if any(issubclass(each.category, WeakDurability) for each in caught):
        text = f"{times}, but folders cannot be synced: a power cut may undo what was reported as saved"
        yield Finding("fsync", "problem", text, f"{ELSEWHERE} for what must survive a power cut")
    else:
        yield Finding("fsync", "ok", times)


def reflink(files: Files, folder: Path) -> Iterator[Finding]:
    """Try whether a copy can share the blocks of its source."""
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
        odd.append("upper and lower case are one: runs that differ by that alone become one")
    try:
        _write(files, folder / ("n" * NAME_BYTES_MAX), b"")
    except StorageIO as exc:
        if exc.errno != errnos.ENAMETOOLONG:
            raise
        odd.append("long names are refused: keep those of runs and pins short")
    yield from (Finding("names", "note", text) for text in odd)
    if not odd:
        yield Finding("names", "ok", "long ones, told apart by case")


def clock(files: Files, folder: Path) -> Iterator[Finding]:
    """Compare the filesystem's clock with this host's."""
    path = _write(files, folder / "touched", b"")
    ahead = []
    for _ in range(_CLOCK_LOOKS):
        files.touch(path)
        ahead.append((files.modified_ns(path) or 0) / 1e9 - time.time())
        time.sleep(0.005)
    skew_seconds = abs(max(ahead))
    text = f"the filesystem's differs from this host's by {skew_seconds:.2f} s"
    if skew_seconds > _SKEW_SECONDS_MAX:
        hint = "ages are told by the filesystem's clock, so nothing is lost; but the times that log shows are odd"
        yield Finding("clock", "note", text, hint)
    else:
        yield Finding("clock", "ok", text)


def space(files: Files, folder: Path) -> Iterator[Finding]:
    """Check how many bytes and files there is still room for."""
    room = files.room(folder)
    many = "any number of files" if room.free_files is None else f"{room.free_files:,} more files"
    text = f"{size(room.free_bytes)} of {size(room.total_bytes)} free, {many}; a quota may allow less"
    has_few_files = room.free_files is not None and room.free_files < _FREE_FILES_MIN
    if room.free_bytes < _FREE_BYTES_MIN or has_few_files:
        hint = "layerstore gc frees what nothing needs; layerstore stats says what is stored"
        yield Finding("space", "note", text, hint)
    else:
        yield Finding("space", "ok", text)


def write_speed(parent: Path) -> float:
    """Write files below *parent* as saves do, past the kernel's cache, for some seconds; return bytes per second."""
    data = os.urandom(STREAM_BYTES)  # incompressible
    files = Files()
    with scratch(files, parent, prefix="estimate") as folder:
        written, started, seconds = 0, time.perf_counter(), 0.0
        while seconds < _SPEED_SECONDS and written < _SPEED_BYTES_MAX:
            with files.create(folder / f"written-{written}") as file, contextlib.closing(Stream(file)) as stream:
                for offset in range(0, _SPEED_FILE_BYTES, STREAM_BYTES):
                    stream.write_at(offset, data)
                stream.finish()
                file.sync()
            files.sync_directory(folder)
            written += _SPEED_FILE_BYTES
            seconds = time.perf_counter() - started
    return written / seconds


# -- the race ------------------------------------------------------------------------------------------------------

CONTESTANTS = 4
ROUNDS = 25
_TIMEOUT_SECONDS = 60.0
# More than a page and more than one kernel write, so that a half-written file would show.
_CONTENT_BYTES = 128 * 1024
_COMMAND = (sys.executable, "-m", "layerstore.check.probes")


def race(
    folder: Path, mount: Mount | None, *, command: Sequence[str] = _COMMAND, rounds: int = ROUNDS
) -> Iterator[Finding]:
    """
    Let processes race in *folder*, on *mount*; each runs *command*, with the folder and its number appended.

    Raises:
        LayerstoreError: One of them failed; the message is its own.
    """
    wrong = Counter[str]()
    with ExitStack() as stack:
        racers = [stack.enter_context(_contestant([*command, str(folder), str(n)])) for n in range(CONTESTANTS)]
        flock = _flock(folder / "flocked", racers[0])
        for number in range(rounds):
            answers = _answers(racers, str(number))
            for what in ("create", "link"):
                wrong[what] += sum(answer[what] for answer in answers) != 1
            wrong.update(answer["seen"] for answer in answers)
    processes = f"{CONTESTANTS} processes, {rounds} rounds"
    problems = [f"{wrong[w]} rounds with not just one winner of a {w}" for w in ("create", "link") if wrong[w]]
    problems += [f"{wrong['torn']} files seen while they were replaced were not whole"] if wrong["torn"] else []
    kept = f"{processes}: one winner each of every create and link; no file was seen in part"
    yield _promise("race", not problems, kept, f"{processes}: {'; '.join(problems)}")
    if wrong["missing"]:
        text = f"a file that is replaced by renaming is missing for a moment ({wrong['missing']} times)"
        hint = "a record that is saved again may not be found at that moment; repeat what reads it"
        yield Finding("race", "note", text, hint)
    if flock == "works on this host":
        text = "flock keeps other processes out, and lets them in afterwards"
        reach = "; whether it reaches other hosts depends on the mount"
        yield Finding("locks", "ok", text + (reach if mount is not None and mount.is_network else ""))
    else:
        text = f"flock {flock}: two commands may do the same work, and harm nothing"
        yield Finding("locks", "note", text)


def _flock(path: Path, racer: "subprocess.Popen[str]") -> str:
    """Try whether another process respects our flock; return what flock does."""
    fd = open_lock_file(path)
    try:
        if try_flock(fd, path) is None:
            return "is absent"
        got_meanwhile = _answers([racer], "flock")[0]["got"]
    finally:
        os.close(fd)
    got_afterwards = _answers([racer], "flock")[0]["got"]
    return "works on this host" if got_afterwards and not got_meanwhile else "does not keep others out"


def _answers(racers: "Sequence[subprocess.Popen[str]]", word: str) -> list[Any]:
    """Ask all *racers* at once."""
    for racer in racers:
        assert racer.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: reading its answer fails below
            racer.stdin.write(f"{word}\n")
            racer.stdin.flush()
    answers = []
    for racer in racers:
        assert racer.stdout is not None
        line = racer.stdout.readline()
        if not line:
            raise LayerstoreError(f"a process that was to race ended without a word, or took {_TIMEOUT_SECONDS:g} s")
        answers.append(json.loads(line))
        if "error" in answers[-1]:
            raise StorageIO(answers[-1]["error"], errno=answers[-1]["errno"], filename="")
    return answers


@contextlib.contextmanager
def _contestant(command: Sequence[str]) -> "Iterator[subprocess.Popen[str]]":
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,  # only we get Ctrl-C, and we end it
    )
    timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
    with process:
        try:
            timer.start()
            yield process
        finally:
            timer.cancel()
            process.kill()


def contest(files: Files, folder: Path, number: int, questions: TextIO, answers: TextIO) -> None:
    """Do in *folder* what *questions* ask for, one per line, until the end."""
    for question in questions:
        word = question.strip()
        try:
            answer: dict[str, object] = _try_flock(folder) if word == "flock" else _round(files, folder, number, word)
        except StorageIO as exc:
            answer = {"error": str(exc), "errno": exc.errno}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _try_flock(folder: Path) -> dict[str, object]:
    fd = open_lock_file(folder / "flocked")
    try:
        return {"got": try_flock(fd, folder / "flocked")}
    finally:
        os.close(fd)


def _round(files: Files, folder: Path, number: int, name: str) -> dict[str, object]:
    created = _creates(files, folder / f"created-{name}")
    # Two files, since the linked one may lose its own name.
    linking, replacing = (
        _write(files, folder / f"{use}-{name}-{number}", bytes([number]) * _CONTENT_BYTES)
        for use in ("linking", "replacing")
    )
    linked = files.link_exclusive(linking, folder / f"linked-{name}")
    files.rename(replacing, folder / "replaced")
    return {"create": created, "link": linked, "seen": _seen(files, folder / "replaced")}


def _seen(files: Files, path: Path) -> str:
    """Return what a reader sees of a file that others keep replacing."""
    try:
        content = files.read(path, size_bytes_max=2 * _CONTENT_BYTES)
    except StorageIO as exc:
        if exc.errno != errnos.ENOENT:
            raise
        return "missing"
    except IntegrityError:  # it ended while it was read
        return "torn"
    return "whole" if content == content[:1] * _CONTENT_BYTES else "torn"


if __name__ == "__main__":
    contest(Files(), Path(sys.argv[1]), int(sys.argv[2]), sys.stdin, sys.stdout)
