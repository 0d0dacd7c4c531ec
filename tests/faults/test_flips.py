"""
The truth is damaged, one bit at a time: every flip is seen before a wrong byte is handed out.

Objects, blobs, records, pins and ``store.json`` of a tiny store; then files cut short, swapped, moved, and replaced
by things that are no files. The number of silent outcomes is 0.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from layerstore.errors import IntegrityError, LayerstoreError, NoStore
from layerstore.model import ObjectId
from layerstore.store import Store, init
from tests.faults.harness import composed, copied, flip, in_child, problems, seeded, snapshot, tiny_checkpoint

FLIPS = 150
"""Bits flipped in a usual run."""


@pytest.fixture(scope="module")
def sound(fast_module_path: Path) -> Path:
    """Return a store with one commit and one pin, to copy."""
    with init(fast_module_path / "store") as store:
        store.ingest(tiny_checkpoint(fast_module_path / "source", layout="hf"), run="run", pin="kept")
        assert store.verify(read_data=True).ok
    return fast_module_path / "store"


def truth_files(store: Path) -> list[Path]:
    """Return every file that the store's promise covers."""
    folders = ("objects", "commits", "pins")
    return [
        store / "store.json",
        *sorted(path for name in folders for path in (store / name).rglob("*") if path.is_file()),
    ]


def noticed(path: Path, *, read_data: bool = True) -> bool:
    """Whether opening or verifying the store at *path* shows that something is wrong."""
    try:
        with Store(path) as store:
            return not store.verify(read_data=read_data).ok
    except LayerstoreError:
        return True


def _flip_all(path: Path, cases: list[tuple[Path, int, int]]) -> list[str]:
    silent = []
    for file, place, bit in cases:
        with file.open("r+b") as opened:
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ bit]))
            opened.flush()
            if not noticed(path):
                silent.append(f"{file}: bit {bit:#04x} of byte {place}")
            opened.seek(place)
            opened.write(bytes([byte]))
    assert not noticed(path)
    return silent


def _cases(path: Path, chance: random.Random) -> list[tuple[Path, int, int]]:
    return [
        (file, place, 1 << chance.randrange(8)) for file in truth_files(path) for place in range(file.stat().st_size)
    ]


@pytest.mark.fault(35, 91, 103)
def test_a_flipped_bit_is_never_silent(sound: Path, fast_path: Path) -> None:
    """A sample over all bytes, and over every file: verify names each flip."""
    chance = seeded("flips")
    path = copied(sound, fast_path / "store")
    everywhere = _cases(path, chance)
    each_file = [chance.choice([case for case in everywhere if case[0] == file]) for file in truth_files(path)]

    chosen = [*chance.sample(everywhere, FLIPS), *each_file]

    assert in_child(_flip_all, path, chosen).needed() == []
    print(f"{len(chosen)} of {len(everywhere)} bytes flipped, 0 silent")


@pytest.mark.fault(35, 91, 103)
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_no_flipped_bit_anywhere_is_silent(sound: Path, fast_path: Path) -> None:
    """The same for every byte of every file."""
    chance = seeded("all flips")
    path = copied(sound, fast_path / "store")
    payloads = tensor_objects(path)
    cases = [case for case in _cases(path, chance) if case[0] not in payloads]
    for start in range(0, len(cases), 2000):
        outcome = in_child(_flip_all, path, cases[start : start + 2000], timeout_seconds=600.0)
        assert outcome.needed() == []
    sizes = [file.stat().st_size for file in payloads]
    for start in range(0, max(sizes), 2000):
        places = [(place, 1 << chance.randrange(8)) for place in range(start, min(start + 2000, max(sizes)))]
        assert in_child(_flip_together, path, payloads, places, timeout_seconds=600.0).needed() == []
    print(f"{len(cases) + sum(sizes)} bytes flipped, 0 silent")


def tensor_objects(path: Path) -> list[Path]:
    """Return the objects that name no others: damage in one of them hides none in another."""
    with Store(path) as store:
        record = next(store._repo.records.read(name) for name in store._repo.records.names("run")).record
    blobs = {*(entry.version.id for entry in record.layers), *(state.id for state in record.states)}
    return [file for file in objects(path) if file.name not in blobs]


def _flip_together(path: Path, files: list[Path], places: list[tuple[int, int]]) -> list[str]:
    """Flip the same byte of all *files* at once; return those that verify does not name."""
    silent = []
    sound = {file: file.read_bytes() for file in files}
    for place, bit in places:
        changed = [file for file in files if place < len(sound[file])]
        for file in changed:
            data = bytearray(sound[file])
            data[place] ^= bit
            file.write_bytes(data)
        with Store(path) as store:
            named = {damage.id for damage in store.verify(read_data=True).damaged}
        silent += [f"{file}: bit {bit:#04x} of byte {place}" for file in changed if file.name not in named]
        for file in changed:
            file.write_bytes(sound[file])
    return silent


@pytest.mark.full
@pytest.mark.fault(34, 91)
def test_a_cut_or_grown_file_is_never_silent(sound: Path, fast_path: Path) -> None:
    """Every file, shortened anywhere or lengthened; sizes are seen even without reading the data."""
    chance = seeded("cuts")
    for file in truth_files(sound):
        path = copied(sound, fast_path / "store")
        changed = path / file.relative_to(sound)
        data = changed.read_bytes()
        for size_bytes in {0, len(data) - 1, len(data) + 1, chance.randrange(len(data))}:
            changed.write_bytes((data + b"\0")[:size_bytes])
            assert noticed(path, read_data=False), (changed, size_bytes)


@pytest.mark.fault(37)
def test_swapped_objects_are_never_silent(sound: Path, fast_path: Path) -> None:
    """Two valid objects under each other's names are two damaged ones, even of the same size."""
    path = copied(sound, fast_path / "store")
    by_size: dict[int, list[Path]] = {}
    for file in truth_files(path):
        by_size.setdefault(file.stat().st_size, []).append(file)
    pairs = [files[:2] for files in by_size.values() if len(files) > 1]
    assert pairs
    for first, second in pairs:
        first.rename(path / "aside")
        second.rename(first)
        (path / "aside").rename(second)
        assert noticed(path)
        with Store(path) as store, pytest.raises(IntegrityError):
            store.compose("run@2").write(fast_path / "out")
        assert not (fast_path / "out").exists()
        first.rename(path / "aside")
        second.rename(first)
        (path / "aside").rename(second)


def objects(path: Path) -> list[Path]:
    """Return the object files of the store at *path*."""
    return sorted((path / "objects").glob("*/*"))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link_to_itself_elsewhere(file: Path) -> None:
    shutil.move(file, file.parents[3] / "elsewhere")
    file.symlink_to(file.parents[3] / "elsewhere")


def _dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nothing")


def _missing(file: Path) -> None:
    file.unlink()


REPLACEMENTS: list[Callable[[Path], None]] = [_folder, _fifo, _link_to_itself_elsewhere, _dangling_link, _missing]


def _judge(path: Path, target: Path) -> list[str]:
    found = [] if noticed(path, read_data=False) else ["a quick verify does not see it"]
    for ref in ("run@2", "kept"):
        try:
            with Store(path) as store:
                store.compose(ref).write(target)
        except IntegrityError:
            continue
        except LayerstoreError as error:
            found.append(f"{ref}: {error!r}")
        else:
            shutil.rmtree(target)
    return found + [f"left behind: {name}" for name in os.listdir(target.parent) if name.startswith(target.name)]


@pytest.mark.fault(36, 38)
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__[1:])
def test_what_is_no_file_is_never_read(sound: Path, fast_path: Path, replace: Callable[[Path], None]) -> None:
    """A folder, fifo or link in the place of an object or record is reported, and nothing blocks or follows."""
    record = next((sound / "commits" / "run").iterdir())
    for file in [*objects(sound)[::5], *([] if replace.__name__ == "_missing" else [record])]:
        path = copied(sound, fast_path / "store")
        replace(path / file.relative_to(sound))

        assert in_child(_judge, path, fast_path / "out", timeout_seconds=20.0).needed() == [], file


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


@pytest.mark.fault(91)
def test_a_damaged_tip_is_never_passed_over(sound: Path, fast_path: Path) -> None:
    """``RUN`` means its newest step: if that cannot be read, the one before is not the answer."""
    path = copied(sound, fast_path / "store")
    with Store(path) as store:
        store.ingest(tiny_checkpoint(fast_path / "later", step=4), run="run")
    record = next((path / "commits" / "run").glob("4.*"))
    record.write_bytes(b"")
    for _ in range(2):
        with Store(path) as store, pytest.raises(IntegrityError):
            store.compose("run")
        shutil.rmtree(path / "manifest")


@pytest.mark.fault(91)
@pytest.mark.parametrize("has_index", [True, False])
def test_a_damaged_record_is_healed_by_the_same_checkpoint(sound: Path, fast_path: Path, has_index: bool) -> None:
    """An ingest that reports success leaves a sound record, also where a damaged one has its name."""
    path = copied(sound, fast_path / "store")
    record = next((path / "commits" / "run").iterdir())
    flip(record)
    if not has_index:
        shutil.rmtree(path / "manifest")

    with Store(path) as store:
        store.ingest(sound.parent / "source", run="run")

        assert store.verify(read_data=True).ok
        assert [entry.damage for entry in store.log()] == [None]


def moved_record(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield places where a record does not belong."""
    record = next((path / "commits" / "run").iterdir())
    step, _, commit = record.name.partition(".")
    yield "another run", path / "commits" / "other" / record.name
    yield "another step", record.with_name(f"3.{commit}")
    yield "another id", record.with_name(f"{step}.{'0' * 32}")


@pytest.mark.fault(96)
def test_a_record_in_the_wrong_place_is_not_believed(sound: Path, fast_path: Path) -> None:
    """Under another step, id or run, or from another store, a whole record is damage."""
    with init(fast_path / "foreign") as store:
        store.ingest(tiny_checkpoint(fast_path / "source"), run="run")
    foreign = next((fast_path / "foreign" / "commits" / "run").iterdir())
    for what, place in [*moved_record(sound), ("another store", sound / "commits" / "run" / foreign.name)]:
        path = copied(sound, fast_path / "store")
        target = path / place.relative_to(sound)
        target.parent.mkdir(exist_ok=True)
        own = next((path / "commits" / "run").iterdir())
        shutil.copy(foreign if what == "another store" else own, target)
        with Store(path) as store:
            assert not store.verify().ok, what
            assert composed(store, "kept", fast_path)
            mine = [entry for entry in store.log("run") if own.name == f"{entry.step}.{entry.commit}"]
            assert [entry.damage for entry in mine] == [None]


def test_a_stranger_in_the_store_harms_nobody(sound: Path, fast_path: Path) -> None:
    """Files of editors and backup programs are reported and otherwise left alone."""
    for place in (
        "commits/notes.txt",
        "commits/run/.swp",
        "pins/.DS_Store",
        "objects/x",
        "objects/00/y",
        "tmp/z",
        "gc/w",
        "README",
    ):
        path = copied(sound, fast_path / "store")
        (path / place).parent.mkdir(exist_ok=True)
        (path / place).write_text("hello")

        assert in_child(_works, path, fast_path).needed() == [], place
        assert (path / place).read_text() == "hello"


def _works(path: Path, folder: Path) -> list[str]:
    with Store(path) as store:
        store.verify(read_data=True)
        log = [(entry.run, entry.step) for entry in store.log()]
        composed(store, "run@2", folder)
        composed(store, None, folder)
        composed(store, "kept", folder)
        store.pin("another", "run@2")
    return [] if log == [("run", 2)] else [repr(log)]


def _asked(path: Path) -> None:
    with Store(path) as store:
        assert store.runs == []


@pytest.mark.fault(95)
@pytest.mark.parametrize("how", ["renamed", "emptied", "file", "link"])
def test_a_store_without_its_commits_is_never_an_empty_one(sound: Path, fast_path: Path, how: str) -> None:
    """A missing folder of records is damage; "no commits" would be a wrong answer."""
    path = copied(sound, fast_path / "store")
    (path / "commits").rename(fast_path / "elsewhere")
    if how == "file":
        (path / "commits").write_text("")
    elif how == "link":
        (path / "commits").symlink_to(fast_path / "elsewhere")
    elif how == "emptied":
        (path / "commits").mkdir()
    if how == "emptied":
        # Only the index had them, and says so.
        (notice,) = in_child(_asked, path, timeout_seconds=20.0).notices
        assert notice.startswith("IndexNotice: the commit run@2 ")
        return
    for question in (Store.log, Store.verify, Store.compose):
        with pytest.raises(IntegrityError), Store(path) as store:
            question(store)


@pytest.mark.fault(43)
def test_a_missing_store_json_is_damage_where_commits_are(sound: Path, fast_path: Path) -> None:
    """Only a folder without commits, pins and objects is "no store"."""
    path = copied(sound, fast_path / "store")
    (path / "store.json").unlink()

    with pytest.raises(IntegrityError):
        Store(path)

    for name in ("commits", "objects", "pins"):
        with pytest.raises(IntegrityError):
            Store(path)
        shutil.rmtree(path / name)
    with pytest.raises(NoStore):
        Store(path)


@pytest.mark.fault(36)
def test_missing_bytes_come_back_with_the_same_checkpoint(sound: Path, fast_path: Path) -> None:
    """A purged object or blob is written again by an ingest of what it came from."""
    for file in objects(sound):
        path = copied(sound, fast_path / "store")
        (path / file.relative_to(sound)).unlink()
        with Store(path) as store:
            assert not store.verify().ok
            store.ingest(sound.parent / "source", run="run")
        assert problems(path, fast_path, {}) == [], file


@pytest.mark.fault(74)
def test_planted_links_are_refused_before_anything_is_written(sound: Path, fast_path: Path) -> None:
    """A folder of the store that is a link to elsewhere is not used."""
    source = sound.parent / "source"
    for name in ("objects", "commits", "pins", "tmp", "locks", "gc", "parts"):
        path = copied(sound, fast_path / "store")
        shutil.rmtree(fast_path / "elsewhere", ignore_errors=True)
        (path / name).rename(fast_path / "elsewhere")
        (path / name).symlink_to(fast_path / "elsewhere")
        before = snapshot(fast_path)

        with pytest.raises(IntegrityError), Store(path) as store:
            store.ingest(source, run="new")

        assert snapshot(fast_path) == before, name


@pytest.mark.fault(74)
@pytest.mark.parametrize("place", ["objects/00", "commits/new"])
def test_planted_links_deeper_down_are_refused_too(sound: Path, fast_path: Path, place: str) -> None:
    """So is a folder of objects, or of a run."""
    path = copied(sound, fast_path / "store")
    (fast_path / "elsewhere").mkdir()
    places = (
        [path / place] if place.startswith("commits") else [path / f"objects/{number:02x}" for number in range(256)]
    )
    for link in places:
        if not link.exists():
            link.symlink_to(fast_path / "elsewhere")

    with Store(path) as store, pytest.raises(IntegrityError):
        store.ingest(tiny_checkpoint(fast_path / "later", step=4), run="new")

    assert os.listdir(fast_path / "elsewhere") == []


@pytest.mark.fault(79)
def test_an_odd_object_id_never_becomes_a_path(sound: Path) -> None:
    """Ids are 32 lower-case hex digits before anything touches the disk."""
    with Store(sound) as store:
        for odd in ("", "..", "A" * 32, "0" * 31, "0" * 33, "../" + "0" * 29, "0" * 31 + "\n", "g" * 32):
            with pytest.raises(LayerstoreError) as caught:
                store._repo.layout.object(ObjectId(odd))
            assert caught.value.exit_code == 2
