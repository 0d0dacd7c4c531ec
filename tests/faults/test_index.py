"""
The index is damaged in every way there is: noticed or without effect, nothing lost, and never a wrong answer.

Everything happens in children, because what LMDB maps can kill: that counts as a failure too, with the place.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import lmdb.verify
import pytest

from layerstore.disk import lock
from layerstore.storage.lmdb_file import problem_in
from layerstore.store import Store, init
from tests.faults.harness import (
    child,
    composed,
    copied,
    in_child,
    problems,
    seeded,
    snapshot,
    tiny_checkpoint,
    truth,
    wait_for,
)
from tests.generated import generate
from tests.unit import samples

PAGE = 4096
META = 152
"""How much of a meta page means something."""
FLIPS = 40
"""Bits flipped in a usual run."""
_EDITS_PER_CHILD = 2000


@dataclass(frozen=True, slots=True)
class Scene:
    """A store whose index has branches and leaves, and what it answers."""

    folder: Path
    answers: str
    composites: dict[str, str]

    @property
    def store(self) -> Path:
        """Where it is."""
        return self.folder / "store"

    @property
    def data(self) -> bytes:
        """Its sound index."""
        return (self.store / "manifest" / "data.mdb").read_bytes()


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Scene:
    """Return a store to copy."""
    folder = fast_module_path
    with init(folder / "store") as store:
        for step in (2, 4):
            store.ingest(tiny_checkpoint(folder / f"step{step}", step=step), run="run")
        store.ingest(folder / "step4", run="other", pin="kept")
        for number in range(12):
            store.ingest(folder / "step4", run=f"run{number}")
        wide = generate(folder / "wide", layers=40, hidden=4, vocab=4)
        for number in range(2):
            store.ingest(wide, run=f"wide{number}")
        composites = {ref: composed(store, ref, folder) for ref in ("run@2", "run@4", "other@4", "kept")}
        return Scene(folder, answers(store), composites)


def answers(store: Store) -> str:
    """Return what *store* answers to every question that its index has a part in."""
    plans = [(ref, store.compose(ref).layers) for ref in ("run", "run@2", "run@4", "other", "kept")]
    return repr((store.runs(), store.log(), plans))


def ask(path: Path) -> tuple[str, list[str]]:
    """Return what the store at *path* answers, also after a write to its index, and the notices it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Store(path) as store:
            first = answers(store)
            repo = store._repo
            names = [name for run in store.runs() for name in repo.records.names(run)]
            for name in names:
                repo.catalog.add(repo.records.read(name))
            second = answers(store)
    assert first == second
    return first, [f"{notice.category.__name__}: {notice.message}" for notice in caught]


# -- bytes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the index's bytes."""

    what: str
    start: int
    data: bytes | None
    """What to write at *start*; None to cut the file there."""

    def apply(self, path: Path) -> None:
        """Change the file *path*."""
        with path.open("r+b") as file:
            if self.data is None:
                file.truncate(self.start)
            else:
                file.seek(self.start)
                file.write(self.data)


def flips(data: bytes, places: Sequence[int], chance: random.Random) -> list[Edit]:
    """Return one flip of a random bit for each of *places*."""
    chosen = [(place, 1 << chance.randrange(8)) for place in places]
    return [Edit(f"bit {bit:#04x} of byte {place}", place, bytes([data[place] ^ bit])) for place, bit in chosen]


def _try_edits(scene: Scene, folder: Path, edits: list[Edit], progress: Path) -> list[str]:
    """Apply each of *edits* to a copy of the index, and return what was answered wrongly."""
    path = copied(scene.store, folder / "edited")
    found = []
    for edit in edits:
        progress.write_text(edit.what)
        shutil.rmtree(path / "manifest", ignore_errors=True)
        shutil.copytree(scene.store / "manifest", path / "manifest")
        edit.apply(path / "manifest" / "data.mdb")
        try:
            answer, notices = ask(path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the index must not cause it
            found.append(f"{edit.what}: {error!r}")
            continue
        found += [f"{edit.what}: other answers"] if answer != scene.answers else []
        found += [f"{edit.what}: {notice}" for notice in notices if not notice.startswith("IndexNotice")]
    return found


def _all_edits(scene: Scene, folder: Path, edits: list[Edit]) -> list[str]:
    """Try *edits*; return what went wrong, and the one that a child has died of."""
    found, progress = list[str](), folder / "progress"
    for start in range(0, len(edits), _EDITS_PER_CHILD):
        args = (scene, folder, edits[start : start + _EDITS_PER_CHILD], progress)
        outcome = in_child(_try_edits, *args, timeout_seconds=240.0)
        found += outcome.needed() if outcome.exit_code == 0 else [f"{progress.read_text()}: {outcome.exit_code}"]
    return found


def _anywhere(data: bytes, chance: random.Random) -> list[Edit]:
    """Return a flip in every byte: in keys, pages and rows."""
    return flips(data, range(len(data)), chance)


def _in_heads(data: bytes, chance: random.Random) -> list[Edit]:
    """Return a flip in the head of every page: wherever LMDB keeps what it believes."""
    assert len(data) > 10 * PAGE, "there is no branch"
    return flips(data, [start + chance.randrange(32) for start in range(0, len(data), PAGE)], chance)


def _in_meta_pages(data: bytes, chance: random.Random) -> list[Edit]:
    """Return a flip of every bit of what LMDB reads first and believes most: it leads to all other pages."""
    places = [place for start in (0, PAGE) for place in range(start, start + META)]
    return [Edit(f"bit {1 << n:#04x} of byte {at}", at, bytes([data[at] ^ 1 << n])) for at in places for n in range(8)]


def _cuts(data: bytes, chance: random.Random) -> list[Edit]:
    """Return cuts at every page's end, and anywhere."""
    places = [*range(0, len(data), PAGE), *chance.sample(range(len(data)), 10)]
    return [Edit(f"cut at {place}", place, None) for place in places]


def _noise(data: bytes, chance: random.Random) -> list[Edit]:
    """Return whole pages of zeros, of noise or of other pages, meta pages above all, and a few wild bytes."""
    edits = [
        Edit("zeros for both meta pages", 0, bytes(2 * PAGE)),
        Edit("noise everywhere", 0, chance.randbytes(len(data))),
        Edit("more noise than there was", len(data), chance.randbytes(2 * PAGE)),
    ]
    for start in range(0, len(data), PAGE):
        other = chance.randrange(0, len(data), PAGE)
        edits.append(Edit(f"zeros on page {start // PAGE}", start, bytes(PAGE)))
        edits.append(Edit(f"noise on page {start // PAGE}", start, chance.randbytes(PAGE)))
        edits.append(Edit(f"page {other // PAGE} on page {start // PAGE}", start, data[other : other + PAGE]))
    for length in (1, 2, 4, 8):
        places = chance.sample(range(len(data) - length), 40)
        edits += [Edit(f"{length} wild bytes at {place}", place, chance.randbytes(length)) for place in places]
    return edits


@pytest.mark.fault(15, 39, 40)
@pytest.mark.parametrize(
    "make", [_anywhere, _in_heads, _in_meta_pages, _cuts, _noise], ids=lambda make: make.__name__[1:]
)
@pytest.mark.parametrize(
    "count", [FLIPS, pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)], id="every one")]
)
def test_a_changed_index_is_noticed_or_without_effect(
    scene: Scene, fast_path: Path, make: Callable[[bytes, random.Random], list[Edit]], count: int | None
) -> None:
    """Whatever has become of its bytes costs at most a rebuild, and kills nobody."""
    chance = seeded(f"index: {make.__name__}")
    edits = make(scene.data, chance)

    assert _all_edits(scene, fast_path, edits if count is None else chance.sample(edits, min(count, len(edits)))) == []


@pytest.mark.fault(101)
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_long_index_is_rebuilt_in_bounded_time(fast_path: Path) -> None:
    """Ten thousand records of 40 layers: two minutes at most, whatever else the machine does."""
    layers = [samples.entry(f"model.layers.{number}") for number in range(40)]
    repo = samples.repo(fast_path / "store")
    for step in range(10_000):
        repo.records.link(samples.commit(samples.record(step=step, layers=layers)))
    started = time.perf_counter()
    with contextlib.closing(repo.catalog):
        assert repo.catalog.rebuild() == 10_000
    assert time.perf_counter() - started < 120.0


@pytest.fixture(scope="module")
def used_file(fast_module_path: Path) -> bytes:
    """Return an index file with all that LMDB makes: two levels, large values, free pages in several records."""
    chance, keys = seeded("a used index"), []
    with lmdb.open(str(fast_module_path), map_size=64 * 1024**2, lib_version=0) as environment:
        for _ in range(60):
            with environment.begin(write=True) as transaction:
                for size_bytes in chance.choices((50, 1500, 3000, 9000), k=20):
                    keys.append(chance.randbytes(47))
                    transaction.put(keys[-1], chance.randbytes(size_bytes))
                for key in chance.sample(keys, 8):
                    transaction.delete(key)
    return (fast_module_path / "data.mdb").read_bytes()


@pytest.mark.full
@pytest.mark.fault(39, 40)
def test_the_check_before_opening_finds_what_lmdbs_own_finds(used_file: bytes, fast_path: Path) -> None:
    """Ours is the faster one, and no less strict: whichever bit flips, wherever the file is cut."""
    chance, path = seeded("flips of a used index"), fast_path / "data.mdb"
    path.write_bytes(used_file)
    assert (problem_in(path), _lmdb_finds(path)) == (None, False)
    pages = len(used_file) // PAGE
    heads = [chance.randrange(pages) * PAGE + chance.randrange(40) for _ in range(2 * FLIPS)]
    metas = [chance.randrange(2) * PAGE + chance.randrange(META) for _ in range(FLIPS // 2)]
    anywhere = [chance.randrange(len(used_file)) for _ in range(FLIPS // 2)]
    cuts = [Edit(f"cut at page {page}", page * PAGE, None) for page in chance.sample(range(pages), 5)]
    found = 0
    for edit in [*flips(used_file, [*heads, *metas, *anywhere], chance), *cuts]:
        path.write_bytes(used_file)
        edit.apply(path)
        if _lmdb_finds(path):
            found += 1
            assert problem_in(path), edit.what
    assert found > FLIPS // 4


def _lmdb_finds(path: Path) -> bool:
    try:
        return bool(lmdb.verify.verify(str(path), subdir=False))  # type: ignore[no-untyped-call]  # it has no annotations
    except lmdb.verify.VerifyError:
        return True


# -- whole files ---------------------------------------------------------------------------------------------------


def _asks_again(path: Path, cut: Path) -> None:
    with Store(path) as store:
        store.log()
        (path.parent / "open").touch()
        wait_for(cut)
        store._repo.catalog._known.clear()
        store.log()


@pytest.mark.fault(15)
@pytest.mark.parametrize("size_bytes", [0, 1, PAGE, 2 * PAGE])
def test_an_index_that_is_cut_while_it_is_open_hurts_that_process_at_most(
    scene: Scene, fast_path: Path, size_bytes: int
) -> None:
    """What it has mapped is gone, which the system answers with a signal; whoever opens it next rebuilds it."""
    path, cut = copied(scene.store, fast_path / "store"), fast_path / "cut"
    with child(_asks_again, path, cut) as process:
        wait_for(fast_path / "open")
        os.truncate(path / "manifest" / "data.mdb", size_bytes)
        cut.touch()
        process.join(60)
        assert process.exitcode in (0, 1, -signal.SIGBUS, 255), process.exitcode

    assert in_child(ask, path).needed()[0] == scene.answers
    assert in_child(problems, path, fast_path, scene.composites).needed() == []


def _replace_by(make: Callable[[Path], object], name: str) -> Callable[[Path], object]:
    """Return what puts something else in the place of the index's file *name*."""

    def harm(index: Path) -> None:
        (index / name).unlink()
        make(index / name)

    return harm


def _link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "planted")


def _file_for_folder(index: Path) -> None:
    shutil.rmtree(index)
    index.write_bytes(b"x")


def _link_for_folder(index: Path) -> None:
    index.rename(index.parent.parent / "elsewhere")
    index.symlink_to(index.parent.parent / "elsewhere")


def _newer_engine(index: Path) -> None:
    shutil.rmtree(index)
    index.mkdir()
    lmdb.open(str(index), lib_version=1).close()


def _in_rows(change: Callable[[Any, list[tuple[bytes, bytes]]], object]) -> Callable[[Path], object]:
    """Return what lets *change* alter the rows in a transaction."""

    def harm(index: Path) -> None:
        with lmdb.open(str(index), lib_version=0) as environment, environment.begin(write=True) as transaction:
            change(transaction, list(transaction.cursor()))

    return harm


def _swapped(transaction: Any, rows: list[tuple[bytes, bytes]]) -> None:
    steps = [(key, value) for key, value in rows if key.startswith(b"step/")]
    for (key, _), (_, value) in zip(steps, [*steps[1:], steps[0]], strict=True):
        transaction.put(key, value)


def _strange(transaction: Any, rows: list[tuple[bytes, bytes]]) -> None:
    for key, value in ((b"run/", b""), (b"step/" + bytes(40), os.urandom(100)), (b"zzz", b"x")):
        transaction.put(key, value)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing there": shutil.rmtree,
    "no data": lambda index: (index / "data.mdb").unlink(),
    "no lock": lambda index: (index / "lock.mdb").unlink(),
    "empty": lambda index: (index / "data.mdb").write_bytes(b""),
    "short lock": lambda index: (index / "lock.mdb").write_bytes(b"x"),
    "noisy lock": lambda index: (index / "lock.mdb").write_bytes(os.urandom(8192)),
    "long noisy lock": lambda index: (index / "lock.mdb").write_bytes(os.urandom(100_000)),
    "a file for the folder": _file_for_folder,
    "a link for the folder": _link_for_folder,
    "a folder for data": _replace_by(Path.mkdir, "data.mdb"),
    "a fifo for data": _replace_by(os.mkfifo, "data.mdb"),
    "a fifo for the lock": _replace_by(os.mkfifo, "lock.mdb"),
    "a link for data": _replace_by(_link, "data.mdb"),
    "a link for the lock": _replace_by(_link, "lock.mdb"),
    "a newer engine": _newer_engine,
    "rows gone": _in_rows(lambda transaction, rows: [transaction.delete(key) for key, _ in rows[1::2]]),
    "all rows gone": _in_rows(
        lambda transaction, rows: [transaction.delete(key) for key, _ in rows if key != b"header"]
    ),
    "header gone": _in_rows(lambda transaction, _: transaction.delete(b"header")),
    "rows swapped": _in_rows(_swapped),
    "strange rows": _in_rows(_strange),
}


def _harm(name: str, index: Path) -> None:
    DAMAGE[name](index)


@pytest.mark.fault(41, 42, 86, 92, 100)
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.sample(6, always=("no lock", "noisy lock"))
def test_a_strange_index_is_rebuilt(scene: Scene, fast_path: Path, name: str) -> None:
    """Whatever lies in the place of the index, the answers are those of a fresh one; nothing hangs or follows links."""
    path = copied(scene.store, fast_path / "store")
    in_child(_harm, name, path / "manifest").needed()
    before, beside = truth(path), snapshot(fast_path / "elsewhere")

    answer, notices = in_child(ask, path, timeout_seconds=20.0).needed()

    assert answer == scene.answers
    assert name != "nothing there" or notices == [], "nobody is warned of an index that was not there yet"
    assert in_child(problems, path, fast_path, scene.composites).needed() == []
    assert truth(path) == before
    assert snapshot(fast_path / "elsewhere") == beside
    assert not (fast_path / "planted").exists()


def _suspended_writer(path: Path) -> None:
    with Store(path) as store:
        store.log()
        index = store._repo.catalog._index
        assert index is not None
        environment = index._environment()
        with (
            lock(path / "manifest" / "writer.lock", what="a test", deadline_seconds=1.0),
            environment.begin(write=True),
        ):
            (path.parent / "holding").touch()
            time.sleep(600)


@pytest.mark.fault(54)
@pytest.mark.exhaustive
def test_a_suspended_writer_stops_nobody(scene: Scene, fast_path: Path) -> None:
    """Whoever waits too long for the index makes another one."""
    path = copied(scene.store, fast_path / "store")
    with child(_suspended_writer, path):
        wait_for(fast_path / "holding")

        answer, notices = in_child(ask, path, timeout_seconds=60.0).needed()

    assert answer == scene.answers
    assert [notice.split(":")[0] for notice in notices] == ["IndexNotice"]
