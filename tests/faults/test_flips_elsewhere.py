"""
What lies around the truth is damaged, one bit at a time: seen by whoever reads it, or without any effect.

Parts, objects aside, the trash, pointers, timings and locks.
Objects, records, pins and ``store.json`` have their own sweep, and so has the index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from layerstore import Keep
from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError, Unsupported
from layerstore.model import BlobRef, ObjectId, Part
from layerstore.storage import SaveTiming, note_timing
from layerstore.store import Store, init
from layerstore.zero3 import Pointer, pointer_bytes, read_pointer
from tests.faults.harness import copied, in_child, seeded, tiny_checkpoint

SESSION = "5" * 32
SAMPLE = 30
"""Flips of each kind of file in a usual run."""
POINTER = Pointer(store="/data/store", store_id="5e" * 16, name="run@6", run="run", attempt=1, step=6)


@dataclass(frozen=True, slots=True)
class Kind:
    """Files of one kind, and who reads them."""

    files: Callable[[Path], Iterable[Path]]
    judge: Callable[[Path, Path], str | None]
    """Takes the store and the file that has a flipped bit; returns what is wrong with what comes of it."""


class _Stop(Exception):  # no error: a stop
    """A collection ends here."""


@pytest.fixture(scope="module")
def full(fast_module_path: Path) -> Path:
    """Return a store with everything in it that a store can have: a part, objects aside, a trash, pointers."""
    folder = fast_module_path
    path = folder / "store"
    with init(path) as store:
        for step in (2, 4, 6):
            store.ingest(tiny_checkpoint(folder / f"step{step}", step=step), run="run")
        store.ingest(tiny_checkpoint(folder / "other", step=6, seed=1), run="run", replace=True)
        repo = store.repo
        repo.parts.open_session(SESSION)
        repo.parts.publish(_part())
        note_timing(repo, "0" * 32, _timing())
        store.log()
    with Store(path, hook=_stop_aside) as stopped, pytest.raises(_Stop):
        stopped.gc(Keep(last=1), grace_seconds=0)
    (path / "pointer").mkdir()
    (path / "pointer" / "states.pt").write_bytes(pointer_bytes(POINTER, stem="states"))
    return path


def _part() -> Part:
    return Part(
        session=SESSION, save=0, rank=0, agreement="a", layers=(), state=None, bytes_new=1, bytes_reused=1, failure=""
    )  # fmt: skip


def _timing() -> SaveTiming:
    return SaveTiming(
        run="run", attempt=1, step=4, save_number=0, blocked_seconds=0.1, durable_seconds=1.0, visible_seconds=None,
        copied_bytes=1, written_bytes=1, layers_saved=1, layers=2, queued=0, failure="",
    )  # fmt: skip


def _stop_aside(operation: str, path: Path) -> None:
    if operation == "unlink" and "aside" in path.parts:
        raise _Stop


# -- who reads what ------------------------------------------------------------------------------------------------


def _part_is_refused(path: Path, file: Path) -> str | None:
    """Whoever joins or collects is told: nothing is made of it, nothing that it names goes."""
    with Store(path) as store:
        try:
            found: list[Part] = store.repo.parts.of_session(SESSION)
        except (IntegrityError, Unsupported):
            return None
    return f"{found}"


def _dropped_is_refused(path: Path, file: Path) -> str | None:
    """It cannot come back, and is listed nowhere; nobody else is kept from anything."""
    with Store(path) as store:
        verdict, shown = store.verify(), [entry.step for entry in store.log()]
        return None if verdict.ok and shown[:1] == [6] and not store.dropped() else f"{store.dropped()}, {verdict}"


def _aside_is_refused(path: Path, file: Path) -> str | None:
    """Objects aside are verified by every reader, as those at their place."""
    with Store(path) as store:
        ref = BlobRef(id=ObjectId(file.name), size_bytes=file.stat().st_size)
        try:
            store.repo.objects.verify(ref)
        except IntegrityError:
            return None
    return "it verifies"


def _pointer_is_right_or_none(path: Path, file: Path) -> str | None:
    try:
        found = read_pointer(file)
    except InvalidInput:
        return None
    return None if found in (None, POINTER) else f"{found}"


def _answers_are_the_same(path: Path, file: Path) -> str | None:
    """What is advisory, or not read at all, changes no answer."""
    with Store(path) as store:
        store.timings("run")
        found = _answers(store)
    return None if found == _ANSWERS.setdefault(path, found) else found


_ANSWERS: dict[Path, str] = {}


def _answers(store: Store) -> str:
    return repr((store.log(), store.compose("run@6").layers, store.verify()))


KINDS: dict[str, Kind] = {
    "parts": Kind(lambda path: path.glob("parts/*/*"), _part_is_refused),
    "trash": Kind(lambda path: path.glob("trash/commits/*/*"), _dropped_is_refused),
    "aside": Kind(lambda path: path.glob("gc/aside/*"), _aside_is_refused),
    "pointers": Kind(lambda path: path.glob("pointer/*"), _pointer_is_right_or_none),
    "stats": Kind(lambda path: path.glob("stats/*/*"), _answers_are_the_same),
    "locks": Kind(lambda path: path.glob("locks/*"), _answers_are_the_same),
}


def test_every_file_of_a_store_is_swept(full: Path) -> None:
    """Here, with the truth or with the index: a new kind of file has to be added somewhere."""
    here = {file for kind in KINDS.values() for file in kind.files(full)}
    elsewhere = {"objects", "commits", "pins", "store.json"}
    index = {"data.mdb", "lock.mdb", "writer.lock"}
    left = [
        file.relative_to(full).as_posix()
        for file in full.rglob("*")
        if file.is_file() and file not in here and file.relative_to(full).parts[0] not in elsewhere
    ]

    assert [name for name in left if name.split("/")[-1] not in index] == []
    assert all(list(kind.files(full)) for kind in KINDS.values())


def _flip_all(path: Path, name: str, cases: list[tuple[Path, int, int]]) -> list[str]:
    judge = KINDS[name].judge
    if judge is _answers_are_the_same:
        assert judge(path, path) is None  # what they are without any flip
    silent = []
    for file, place, bit in cases:
        data = file.read_bytes()
        file.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
        try:
            wrong = judge(path, file)
        except LayerstoreError as exc:
            wrong = repr(exc)
        silent += [f"{file}: bit {bit:#04x} of byte {place}: {wrong}"] if wrong else []
        file.write_bytes(data)
    return silent


def _cases(path: Path, name: str, chance: random.Random) -> list[tuple[Path, int, int]]:
    files = sorted(KINDS[name].files(path))
    return [(file, place, 1 << chance.randrange(8)) for file in files for place in range(file.stat().st_size)]


def _sweep(full: Path, fast_path: Path, name: str, size: int | None) -> None:
    chance = seeded(f"flips of {name}")
    path = copied(full, fast_path / "store")
    everywhere: list[Any] = _cases(path, name, chance)
    chosen = everywhere if size is None else chance.sample(everywhere, min(size, len(everywhere)))
    for start in range(0, len(chosen), 20_000):
        cases = chosen[start : start + 20_000]
        assert in_child(_flip_all, path, name, cases, timeout_seconds=1200.0).needed() == []
    print(f"{name}: {len(chosen)} of {len(everywhere)} bytes flipped, 0 silent")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(2)
def test_a_flip_around_the_truth_is_seen_or_without_effect(full: Path, fast_path: Path, name: str) -> None:
    """A sample of the bytes of each kind of file."""
    _sweep(full, fast_path, name, SAMPLE)


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", KINDS)
def test_no_flip_around_the_truth_is_silent(full: Path, fast_path: Path, name: str) -> None:
    """The same for every byte of each file."""
    _sweep(full, fast_path, name, None)
