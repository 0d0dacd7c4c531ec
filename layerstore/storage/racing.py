"""
Several processes that want the same names at once: does the filesystem give each name to one of them only?

The format rests on that (docs/reference/format.md, section 2). ``race`` starts the contestants, each of which is
``python -m layerstore.storage.racing FOLDER NUMBER``, and has them run against each other round by round.
"""

import contextlib
import errno as errnos
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from layerstore.errors import IntegrityError, LayerstoreError, StorageIO
from layerstore.storage.files import Files
from layerstore.storage.locks import open_lock_file, try_flock

CONTESTANTS = 4
ROUNDS = 25
_TIMEOUT_SECONDS = 60.0
# More than a page, and more than one write of the kernel's: half of it would show.
_CONTENT_BYTES = 128 * 1024
_COMMAND = (sys.executable, "-m", "layerstore.storage.racing")


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
