"""
What a filesystem can do, tried out: in a folder of its own, through the seam that the store writes through.

Each probe returns what it found; what that means is said in ``doctor.py``.
"""

import contextlib
import errno as errnos
import json
import math
import os
import secrets
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from layerstore.errors import IntegrityError, LayerstoreError, StorageIO
from layerstore.limits import NAME_BYTES_MAX, STREAM_BYTES
from layerstore.storage import Files, Stream, WeakDurability, open_lock_file, try_flock

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
        return copy.clone(file)


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


CONTESTANTS = 4
ROUNDS = 25
_TIMEOUT_SECONDS = 60.0
# More than a page, and more than one write of the kernel's: half of it would show.
_CONTENT_BYTES = 128 * 1024
_COMMAND = (sys.executable, "-m", "layerstore.check.probes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What came of it."""

    contestants: int
    rounds: int
    created_wrongly: int
    """Rounds in which not exactly one could create a file that all wanted to create."""
    linked_wrongly: int
    """Rounds in which not exactly one could link its file under a name that all wanted."""
    torn: int
    """How often a file that others replaced by renaming was seen otherwise than whole."""
    missing: int
    """How often such a file was not there at all."""
    flock: str
    """``works``, ``absent``, or ``blind``: another process gets what is locked."""


def race(folder: Path, *, command: Sequence[str] = _COMMAND, rounds: int = ROUNDS) -> Race:
    """
    Let processes race in *folder*, which is theirs; each is a *command* that ends in the folder and its number.

    Raises:
        LayerstoreError: One of them could not go on; its own words say why.
    """
    with ExitStack() as stack:
        racers = [stack.enter_context(_contestant([*command, str(folder), str(n)])) for n in range(CONTESTANTS)]
        timer = threading.Timer(_TIMEOUT_SECONDS, _kill_all, [racers])
        stack.callback(timer.cancel)
        timer.start()
        flock = _flock(folder / "flocked", racers[0])
        created_wrongly = linked_wrongly = torn = missing = 0
        for number in range(rounds):
            for racer in racers:
                racer.ask(str(number))
            answers = [racer.answer() for racer in racers]
            created_wrongly += sum(answer["created"] for answer in answers) != 1
            linked_wrongly += sum(answer["linked"] for answer in answers) != 1
            torn += sum(answer["seen"] == "torn" for answer in answers)
            missing += sum(answer["seen"] == "missing" for answer in answers)
        return Race(
            contestants=len(racers),
            rounds=rounds,
            created_wrongly=created_wrongly,
            linked_wrongly=linked_wrongly,
            torn=torn,
            missing=missing,
            flock=flock,
        )


def _kill_all(racers: "Sequence[_Racer]") -> None:
    for racer in racers:
        racer.process.kill()


def _flock(path: Path, racer: "_Racer") -> str:
    """Try whether another process minds an flock of ours."""
    fd = open_lock_file(path)
    try:
        if try_flock(fd, path) is None:
            return "absent"
        racer.ask("flock")
        if racer.answer()["got"]:
            return "blind"
    finally:
        os.close(fd)
    racer.ask("flock")
    return "works" if racer.answer()["got"] else "blind"


@dataclass(frozen=True, slots=True)
class _Racer:
    process: "subprocess.Popen[str]"

    def ask(self, word: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its answer is missing then, which tells
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise LayerstoreError(f"a process that was to race ended without a word, or took {_TIMEOUT_SECONDS:g} s")
        answer = json.loads(line)
        if "error" in answer:
            raise StorageIO(answer["error"], errno=answer["errno"], filename="")
        return answer


@contextlib.contextmanager
def _contestant(command: Sequence[str]) -> Iterator[_Racer]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C is for whoever started it, who then ends it
    )
    with process:
        try:
            yield _Racer(process)
        finally:
            process.kill()


# -- the contestant ------------------------------------------------------------------------------------------------


def contest(files: Files, folder: Path, number: int, questions: TextIO, answers: TextIO) -> None:
    """Do in *folder* what *questions* ask for, one a line, until there are no more."""
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
    try:
        files.create(folder / f"created-{name}").close()
        created = True
    except StorageIO as exc:
        if exc.errno != errnos.EEXIST:
            raise
        created = False
    linking, replacing = (folder / f"{use}-{name}-{number}" for use in ("linking", "replacing"))
    for path in (linking, replacing):  # two, as the one that is linked may have no name left
        with files.create(path) as source:
            source.write_at(0, bytes([number]) * _CONTENT_BYTES)
    linked = files.link_exclusive(linking, folder / f"linked-{name}")
    files.rename(replacing, folder / "replaced")
    return {"created": created, "linked": linked, "seen": _seen(files, folder / "replaced")}


def _seen(files: Files, path: Path) -> str:
    """Return how a file looks that others are replacing."""
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
