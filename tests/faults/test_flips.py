"""
A store is damaged, one bit at a time: every flip is seen before a wrong byte is handed out, or is without effect.

Each kind of file has somebody who reads it, and judges; the index has its own sweep, in test_index. Then files that
are cut short, missing, or in the wrong place, which nobody repairs; what repair does is in test_repair.
The number of silent outcomes is 0.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerstore import Keep
from layerstore.errors import IntegrityError, InvalidInput, LayerstoreError, Unsupported
from layerstore.model import BlobRef, ObjectId
from layerstore.parts import Part
from layerstore.publish.timings import SaveTiming, note_timing
from layerstore.store import Store, init
from layerstore.zero3 import Pointer, pointer_bytes, read_pointer
from tests.faults.harness import composed, copied, in_child, seeded, snapshot, tiny_checkpoint

SESSION = "5" * 32
POINTER = Pointer(store="/data/store", store_id="5e" * 16, name="run@6", run="run", attempt=1, step=6)


@pytest.fixture(scope="module")
def sound(fast_module_path: Path) -> Path:
    """Return a store with one commit and one pin, to copy."""
    with init(fast_module_path / "store") as store:
        store.ingest(tiny_checkpoint(fast_module_path / "source", layout="hf"), run="run", pin="kept")
        assert store.verify(read_data=True).ok
    return fast_module_path / "store"


class _Stop(Exception):  # no error: a stop
    """A collection ends here."""


def _stop_aside(operation: str, path: Path) -> None:
    if operation == "unlink" and "aside" in path.parts:
        raise _Stop


@pytest.fixture(scope="module")
def full(fast_module_path: Path) -> Path:
    """Return a store with all that a store can have: compact saves, a part, objects aside, a trash, pointers."""
    folder = fast_module_path / "full"
    path = folder / "store"
    folder.mkdir()
    with init(path) as store:
        for step in (2, 4, 6):
            store.ingest(tiny_checkpoint(folder / f"step{step}", step=step, layout="hf"), run="run", precision="delta8")
        store.pin("kept", "run@6")
        store.ingest(tiny_checkpoint(folder / "other", step=6, seed=1), run="run", replace=True)
        timing = SaveTiming(
            run="run", attempt=1, step=4, save_number=0, blocked_seconds=0.1, durable_seconds=1.0, visible_seconds=None,
            copied_bytes=1, written_bytes=1, layers_saved=1, layers=2, queued=0, failure="",
        )  # fmt: skip
        note_timing(store.repo, "0" * 32, timing)
        store.log()
    with Store(path, hook=_stop_aside) as stopped, pytest.raises(_Stop):
        stopped.gc(Keep(last=1), grace_seconds=0)
    with Store(path) as store:  # that collection has taken all idle parts
        part = Part(
            session=SESSION, save=0, rank=0, agreement="a", layers=(), state=None, bytes_new=1, bytes_reused=1,
            failure="",
        )  # fmt: skip
        store.repo.parts.open_session(SESSION)
        store.repo.parts.publish(part)
    (path / "pointer").mkdir()
    (path / "pointer" / "states.pt").write_bytes(pointer_bytes(POINTER, Path("states.pt")))
    return path


# -- who reads what ------------------------------------------------------------------------------------------------


def noticed(path: Path, *, read_data: bool = True) -> bool:
    """Whether opening or verifying the store at *path* shows that something is wrong."""
    try:
        with Store(path) as store:
            return not store.verify(read_data=read_data).ok
    except LayerstoreError:
        return True


def _verify_sees_it(path: Path, file: Path) -> str | None:
    return None if noticed(path) else "nobody sees it"


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
        found = repr((store.log(), store.compose("run@6").layers, store.verify()))
    return None if found == _ANSWERS.setdefault(path, found) else found


_ANSWERS: dict[Path, str] = {}


@dataclass(frozen=True, slots=True)
class Kind:
    """Files of one kind, and who reads them."""

    files: Callable[[Path], Iterable[Path]]
    judge: Callable[[Path, Path], str | None]
    """Takes the store and the file that has a flipped bit; returns what is wrong with what comes of it."""
    flips: int = 30
    """In a usual run."""


KINDS: dict[str, Kind] = {
    "store.json": Kind(lambda path: [path / "store.json"], _verify_sees_it, 10),
    "objects": Kind(lambda path: path.glob("objects/*/*"), _verify_sees_it, 20),
    "commits": Kind(lambda path: path.glob("commits/*/*"), _verify_sees_it),
    "pins": Kind(lambda path: path.glob("pins/*"), _verify_sees_it),
    "parts": Kind(lambda path: path.glob("parts/*/*"), _part_is_refused),
    "trash": Kind(lambda path: path.glob("trash/commits/*/*"), _dropped_is_refused),
    "aside": Kind(lambda path: path.glob("gc/aside/*"), _aside_is_refused),
    "pointers": Kind(lambda path: path.glob("pointer/*"), _pointer_is_right_or_none),
    "stats": Kind(lambda path: path.glob("stats/*/*"), _answers_are_the_same),
    "locks": Kind(lambda path: path.glob("locks/*"), _answers_are_the_same),
}


def test_every_file_of_a_store_is_swept(full: Path) -> None:
    """Here, or with the index: a new kind of file has to be added somewhere."""
    swept = {file for kind in KINDS.values() for file in kind.files(full)}
    left = [file for file in full.rglob("*") if file.is_file() and file not in swept]

    assert [file for file in left if file.name not in {"data.mdb", "lock.mdb", "writer.lock"}] == []
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


@pytest.mark.fault(35, 91, 103)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(None, marks=pytest.mark.sample(2, by="name", always=("objects", "commits", "pins")), id="some"),
        pytest.param(20_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_a_flipped_bit_is_seen_or_without_effect(full: Path, fast_path: Path, name: str, count: int | None) -> None:
    """A sample of the bytes of each kind; in an exhaustive run every byte, but of objects."""
    kind, chance = KINDS[name], seeded(f"flips of {name}")
    path = copied(full, fast_path / "store")
    files = sorted(kind.files(path))
    everywhere = [(file, place, 1 << chance.randrange(8)) for file in files for place in range(file.stat().st_size)]
    some = chance.sample(files, min(10, len(files)))
    chosen = [chance.choice([case for case in everywhere if case[0] == file]) for file in some]
    chosen += chance.sample(everywhere, min(count or kind.flips, len(everywhere)))
    for start in range(0, len(chosen), 2000):
        outcome = in_child(_flip_all, path, name, chosen[start : start + 2000], timeout_seconds=1200.0)
        assert outcome.needed() == []
    print(f"{name}: {len(chosen)} of {len(everywhere)} bytes flipped, 0 silent")


# -- sizes and records ---------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.fault(34, 91)
def test_a_cut_or_grown_file_is_never_silent(sound: Path, fast_path: Path) -> None:
    """Every file, shortened anywhere or lengthened; sizes are seen even without reading the data."""
    chance = seeded("cuts")
    path = copied(sound, fast_path / "store")
    for file in (file for kind in KINDS.values() if kind.judge is _verify_sees_it for file in kind.files(path)):
        data = file.read_bytes()
        for size_bytes in {0, len(data) - 1, len(data) + 1, chance.randrange(len(data))}:
            file.write_bytes((data + b"\0")[:size_bytes])
            assert noticed(path, read_data=False), (file, size_bytes)
        file.write_bytes(data)


@pytest.mark.fault(91, 103)
def test_a_damaged_record_is_reported_and_hides_no_other(sound: Path, fast_path: Path) -> None:
    """The log shows it as damaged with and without the index, the pin of the same commit still composes."""
    path = copied(sound, fast_path / "store")
    with Store(path) as store:
        expected = composed(store, "kept", fast_path)
        store.ingest(tiny_checkpoint(fast_path / "later", step=4), run="run")
    record = next((path / "commits" / "run").glob("2.*"))
    record.write_bytes(record.read_bytes()[:-1])
    for _ in range(2):
        with Store(path) as store:
            shown = {entry.step: entry.damage is not None for entry in store.log()}
            assert shown == {2: True, 4: False}
            with pytest.raises(IntegrityError):
                store.compose("run@2")
            assert store.compose("run").step == 4
            assert composed(store, "kept", fast_path) == expected
        shutil.rmtree(path / "manifest")
    next((path / "commits" / "run").glob("4.*")).write_bytes(b"")
    for _ in range(2):  # the run means its newest step: the one before is not the answer
        with Store(path) as store, pytest.raises(IntegrityError):
            store.compose("run")
        shutil.rmtree(path / "manifest")


# -- folders and strangers -----------------------------------------------------------------------------------------


def _works(path: Path, folder: Path) -> list[str]:
    with Store(path) as store:
        store.verify(read_data=True)
        log = [(entry.run, entry.step) for entry in store.log()]
        for ref in ("run@2", None, "kept"):
            composed(store, ref, folder)
        store.pin("another", "run@2")
        pins = [pin.name for pin in store.pins()]
    return [] if (log, pins) == ([("run", 2)], ["another", "kept"]) else [repr((log, pins))]


def test_a_stranger_in_the_store_harms_nobody(sound: Path, fast_path: Path) -> None:
    """Files of editors and backup programs, and names that are none, are left alone."""
    places = ["commits/notes.txt", "commits/run/.swp", "pins/.DS_Store", "objects/x", "objects/00/y", "tmp/z", "gc/w"]
    odd = [
        "commits/a@b",
        "commits/e\u0301",
        "commits/new\nline",
        os.fsdecode(b"commits/\xff"),
        os.fsdecode(b"pins/\xff"),
    ]
    path = copied(sound, fast_path / "store")
    for place in [*places, "README", *odd]:
        (path / place).parent.mkdir(exist_ok=True)
        (path / place).write_text("hello") if place not in odd[:4] else (path / place).mkdir()

    assert in_child(_works, path, fast_path).needed() == []
    assert all((path / place).read_text() == "hello" for place in places)
    with Store(path) as store:
        named = {damage.path for damage in store.verify().damaged if damage.kind == "stranger"}
    assert {*odd[:4], "commits/notes.txt"} <= named


def _asked(path: Path) -> None:
    with Store(path) as store:
        assert store.runs() == []


@pytest.mark.fault(95)
@pytest.mark.parametrize("how", ["renamed", "emptied", "file", "link"])
def test_a_store_without_its_commits_is_never_an_empty_one(sound: Path, fast_path: Path, how: str) -> None:
    """A missing folder of records is damage, which no repair takes away; "no commits" would be a wrong answer."""
    path = copied(sound, fast_path / "store")
    (path / "commits").rename(fast_path / "elsewhere")
    if how == "file":
        (path / "commits").write_text("")
    elif how == "link":
        (path / "commits").symlink_to(fast_path / "elsewhere")
    elif how == "emptied":
        (path / "commits").mkdir()
        # Only the index had them, and says so.
        (notice,) = in_child(_asked, path, timeout_seconds=20.0).notices
        assert notice.startswith("IndexNotice: the commit run@2 ")
        return
    for question in (Store.log, Store.verify, Store.compose, Store.repair):
        with pytest.raises(IntegrityError), Store(path) as store:
            question(store)


@pytest.mark.fault(74)
@pytest.mark.parametrize(
    "name", ["objects", "commits", "pins", "tmp", "locks", "gc", "parts", "objects/00", "commits/new"]
)
def test_planted_links_are_refused_before_anything_is_written(sound: Path, fast_path: Path, name: str) -> None:
    """A folder of the store that is a link to elsewhere is not used."""
    path, elsewhere = copied(sound, fast_path / "store"), fast_path / "elsewhere"
    if (path / name).exists():
        (path / name).rename(elsewhere)
    elsewhere.mkdir(exist_ok=True)
    links = [path / f"objects/{number:02x}" for number in range(256)] if "/0" in name else [path / name]
    for link in links:
        if not link.exists():
            link.symlink_to(elsewhere)
    source, before = tiny_checkpoint(fast_path / "later", step=4), snapshot(elsewhere)

    with pytest.raises(IntegrityError), Store(path) as store:
        store.ingest(source, run="new")

    assert snapshot(elsewhere) == before


@pytest.mark.fault(79)
def test_an_odd_object_id_never_becomes_a_path(sound: Path) -> None:
    """Ids are 32 lower-case hex digits before anything touches the disk."""
    with Store(sound) as store:
        for odd in ("", "..", "A" * 32, "0" * 31, "0" * 33, "../" + "0" * 29, "0" * 31 + "\n", "g" * 32):
            with pytest.raises(InvalidInput):
                store.repo.layout.object(ObjectId(odd))
