"""What others do while a collection is at work, and what one that was stopped leaves to the next."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import Conflict, StorageIO
from layerstore.model import CommitRecord
from layerstore.ops.marking import Marks
from layerstore.ops.pins import pin
from layerstore.ops.progress import Progress
from layerstore.ops.refs import Resolved, resolve
from layerstore.ops.setup import open_rooms
from layerstore.storage import garbage
from layerstore.storage.files import Files
from layerstore.storage.handles import Hook
from tests.unit.test_gc import Checkpoints, collect, objects, steps

FIRST = Keep(last=1)


class Stopped(Exception):  # no error: a stop
    """A collection ends here."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with nothing in it."""
    with layerstore.init(tmp_path / "store") as made:
        yield made


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints."""
    return Checkpoints(tmp_path)


def grow_old(store: Store) -> None:
    """Let everything be as old as the clock allows: from here on only a touch protects it."""
    for path in (store.path / "objects").rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))


def once(operation: str, part: str, action: Callable[[], object]) -> Hook:
    """Return a hook that does *action* before the first such operation."""
    done: list[object] = []

    def hook(doing: str, path: Path) -> None:
        if doing == operation and part in path.parts and not done:
            done.append(None)
            done.append(action())

    return hook


def stop() -> None:
    """Stop a collection."""
    raise Stopped


def looked_up(store: Store, ref: str) -> Resolved:
    """Return what somebody has looked up who is slow to make something of it."""
    return resolve(open_rooms(store.path, Files()), ref)


def pinned(store: Store, name: str, found: Resolved) -> bool:
    """Pin what was looked up; return whether that was possible."""
    try:
        pin(open_rooms(store.path, Files()), name, found)
    except Conflict:
        return False
    return True


def blobs_of(record: CommitRecord) -> set[str]:
    """Return the ids of a record's version and state blobs."""
    return {entry.version.id for entry in record.layers} | {state.id for state in record.states}


# -- others at work ------------------------------------------------------------------------------------------------


def test_a_commit_whose_times_are_old_is_seen_at_the_second_look(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its youth saves it: the record that names it does, a pin does, and they came after the plan."""
    for step in (10, 20, 30):
        store.ingest(saved(step), run="r")
    old = looked_up(store, "r@20")

    looks: list[Marks] = []
    look = Marks.look

    def save_before_the_second(self: Marks, progress: Progress) -> None:
        if looks:
            with layerstore.open(store.path) as other:
                other.ingest(saved(10), run="again")
            assert pinned(store, "kept", old)
            grow_old(store)
            for path in (store.path / "gc").glob("*/aside/*"):
                os.utime(path, (1, 1))
        looks.append(self)
        look(self, progress)

    monkeypatch.setattr(Marks, "look", save_before_the_second)
    grow_old(store)
    collect(store, FIRST, runs=["r"], grace_seconds=None)

    assert len(looks) == 2
    assert store.verify(read_data=True).ok


def test_the_same_ingest_again_while_its_commit_is_collected(store: Store, saved: Checkpoints) -> None:
    """It inherits, and claims what it does: it is whole and new, or refused."""
    for step in (10, 20, 30):
        store.ingest(saved(step), run="r", policy="parity")
    grow_old(store)

    def collect_it() -> None:
        with layerstore.open(store.path) as other:
            collect(other, FIRST, grace_seconds=None)

    with Store(store.path, hook=once("link", "commits", collect_it)) as writing:
        again = writing.ingest(saved(20), run="r", policy="parity")

    assert again.is_new
    with layerstore.open(store.path) as fresh:
        assert steps(fresh, "r") == [30, 20]
        assert fresh.verify(read_data=True).ok


def test_who_is_refused_leaves_no_trap(store: Store, saved: Checkpoints) -> None:
    """One object is gone: neither the first who inherits, nor the second, may believe the blob that names it."""
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    grow_old(store)
    old = looked_up(store, "r@10")
    rooms = open_rooms(store.path, Files())
    held = {stored.id for entry in old.record.layers for stored in rooms.version(entry.version).objects}
    told: list[bool] = []

    def inherit_twice() -> None:
        (aside,) = (store.path / "gc").glob("*/aside")
        next(path for path in aside.iterdir() if path.name in held).unlink()
        told.extend(pinned(store, name, old) for name in ("one", "two"))

    with Store(store.path, hook=once("unlink", "aside", inherit_twice)) as collecting:
        collect(collecting, FIRST, grace_seconds=None)

    assert told == [False, False]
    assert store.verify().ok


def test_a_blob_at_its_place_says_that_its_objects_are_not_going(store: Store, saved: Checkpoints) -> None:
    """Also where an earlier collection was stopped between the two: somebody claims the blob, and looks no further."""
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    grow_old(store)
    old = looked_up(store, "r@10")
    moved: list[str] = []

    def stop_between(doing: str, path: Path) -> None:
        if doing == "rename" and "aside" in path.parts:
            if path.name in blobs_of(old.record) and moved:
                stop()
            moved.append(path.name)

    with Store(store.path, hook=stop_between) as stopped, pytest.raises(Stopped):
        collect(stopped, FIRST, grace_seconds=None)
    told: list[bool] = []
    claim = once("mkdir", "aside", lambda: told.append(pinned(store, "kept", old)))
    with Store(store.path, hook=claim) as collecting:
        collect(collecting, grace_seconds=None)

    assert len(told) == 1
    assert store.verify(read_data=True).ok


def test_what_is_linked_back_is_young_again(store: Store, saved: Checkpoints) -> None:
    """An ingest reuses what a stopped collection had moved aside; the next one lets it be."""
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    grow_old(store)
    with Store(store.path, hook=once("unlink", "aside", stop)) as stopped, pytest.raises(Stopped):
        collect(stopped, FIRST, grace_seconds=None)

    def collect_again() -> None:
        with layerstore.open(store.path) as other:
            collect(other, grace_seconds=None)

    with Store(store.path, hook=once("link", "commits", collect_again)) as writing:
        writing.ingest(saved(10), run="again")

    assert store.verify(read_data=True).ok


def test_a_session_that_comes_to_life_keeps_its_new_part(store: Store, saved: Checkpoints) -> None:
    """Only parts that are old themselves go."""
    store.ingest(saved(10), run="r")
    session = store.path / "parts" / ("a" * 32)
    session.mkdir()
    for name in ("1.0", "2.0"):
        (session / name).write_bytes(b"")
        os.utime(session / name, (1, 1))
    os.utime(session, (1, 1))

    with Store(store.path, hook=once("unlink", "parts", (session / "2.0").touch)) as collecting:
        collect(collecting, grace_seconds=None)

    assert [path.name for path in session.iterdir()] == ["2.0"]


# -- collections that were stopped ---------------------------------------------------------------------------------


def test_what_a_stopped_collection_left_aside_is_counted(store: Store, saved: Checkpoints) -> None:
    """The plan and the deed of the next one say what it frees."""
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    with Store(store.path, hook=once("unlink", "aside", stop)) as stopped, pytest.raises(Stopped):
        collect(stopped, FIRST)
    aside = sum(path.stat().st_size for path in (store.path / "gc").glob("*/aside/*"))

    planned, done = collect(store, dry_run=True), collect(store)

    assert planned.bytes_freed == done.bytes_freed == aside > 0
    assert list((store.path / "gc").glob("*/aside")) == []


def test_a_stopped_collection_excuses_nothing_that_is_lost_later(store: Store, saved: Checkpoints) -> None:
    """The next one takes over what it has removed, and forgets the rest of its plan."""
    for step in (10, 20, 30):
        store.ingest(saved(step), run="r")
    removed: list[Path] = []

    def stop_at_the_second(doing: str, path: Path) -> None:
        if doing == "unlink" and "commits" in path.parts:
            if removed:
                stop()
            removed.append(path)

    with Store(store.path, hook=stop_at_the_second) as stopped, pytest.raises(Stopped):
        collect(stopped, FIRST)
    with layerstore.open(store.path) as fresh:
        assert len(steps(fresh, "r")) == 2
        collect(fresh)
        assert fresh.verify().ok
    (left,) = [path for path in (store.path / "commits" / "r").iterdir() if not path.name.startswith("30.")]
    left.unlink()

    with layerstore.open(store.path) as fresh:
        assert [damage.kind for damage in fresh.verify().damaged] == ["record"]


def test_a_folder_that_was_emptied_by_hand_counts_on(store: Store, saved: Checkpoints) -> None:
    """The index remembers which collection was the last; stray files are nobody's business."""
    for step in (10, 20, 30, 40):
        store.ingest(saved(step), run="r")
    for count in (3, 2):
        collect(store, Keep(last=count))
    shutil.rmtree(store.path / "gc")
    (store.path / "gc").mkdir()
    (store.path / "gc" / "README").write_text("hello")

    collect(store, FIRST)
    store.ingest(saved(50), run="r")

    with layerstore.open(store.path) as fresh:
        assert steps(fresh, "r") == [50, 40]
        assert fresh.verify().ok


def test_on_a_network_filesystem_objects_wait_aside(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a collection that comes a grace age later: another node's listing may be late."""
    monkeypatch.setattr(garbage, "network_filesystem", lambda path: "nfs")
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    before = sum(objects(store).values())
    grow_old(store)

    first = collect(store, FIRST, grace_seconds=None)
    second = collect(store, grace_seconds=None)
    for aside in (store.path / "gc").glob("*/aside"):
        os.utime(aside, (1, 1))
    third = collect(store, grace_seconds=None)

    freed = before - sum(objects(store).values())
    assert (first.bytes_freed, first.waiting.size_bytes) == (0, freed)
    assert (second.bytes_freed, second.waiting.size_bytes) == (0, freed)
    assert (third.bytes_freed, third.waiting.size_bytes) == (freed, 0)
    assert list((store.path / "gc").glob("*/aside")) == []


def test_on_a_full_disk_a_collection_gives_its_reserve_back(store: Store, saved: Checkpoints) -> None:
    """Made by ``init``, given back for the plan, and made anew once there is space."""
    for step in (10, 20):
        store.ingest(saved(step), run="r")
    reserve = store.path / "locks" / "gc.reserve"
    seen: list[bool] = []

    def full_until_then(doing: str, path: Path) -> None:
        if doing == "link" and "plans" in path.parts:
            seen.append(reserve.exists())
            if reserve.exists():
                raise StorageIO("cannot link", errno=errno.ENOSPC, filename=str(path))

    with Store(store.path, hook=full_until_then) as collecting:
        done = collect(collecting, FIRST)

    assert seen == [True, False]
    assert done.bytes_freed > 0
    assert reserve.exists()
    assert store.verify(read_data=True).ok


# -- what is not forgotten -----------------------------------------------------------------------------------------


def test_the_newest_is_the_tip_of_the_history(store: Store, saved: Checkpoints) -> None:
    """Not of the newest attempt's own saves: what was filled in below its fork is older than that."""
    for step in (100, 120, 130):
        store.ingest(saved(step), run="r")
    store.ingest(saved(110), run="r", rollback=True)
    store.ingest(saved(150), run="r")
    store.ingest(saved(50), run="r")

    planned = collect(store, Keep(last=3), dry_run=True)
    assert [fate.step for fate in planned.commits if fate.kept_by] == [150, 110, 100]
    for step in (150, 110, 130, 120):
        store.drop(f"r@{step}" if step in {150, 110} else f"r~1@{step}", last=True)
    tip = store.show("r").commit
    collect(store, FIRST)

    assert store.show("r").commit == tip
    assert steps(store, "r") == [100]


def test_a_number_is_given_once(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Also after what had it was dropped and collected: parity takes turns as if nothing had been collected."""
    for step in (10, 20, 30):
        store.ingest(saved(step), run="r")
    store.drop("r@30")
    shutil.copytree(store.path, tmp_path / "other")
    collect(store)

    with layerstore.open(tmp_path / "other") as other:
        for each in (store, other):
            for step in (40, 50):
                each.ingest(saved(step), run="r", policy="parity")
        assert store.compose("r").layers == other.compose("r").layers
        assert store.show("r").save_number == other.show("r").save_number == 4


@pytest.mark.parametrize("keep", [None, Keep(last=2)], ids=["dropped", "not kept"])
def test_what_training_was_resumed_from_is_not_forgotten(store: Store, saved: Checkpoints, keep: Keep | None) -> None:
    """Its first save goes; composites of later ones take from before it what training went on from, or nothing."""
    for step in (10, 20, 30):
        store.ingest(saved(step), run="r")
        store.pin(f"kept-{step}", f"r@{step}")
    mix = store.compose("r@30", policy="parity")
    mix.pin("mix")
    store.ingest(saved(40), run="r", resumed_from="mix")
    for step in (50, 60):
        store.ingest(saved(step), run="r")
    if keep is None:
        store.drop("r@40")

    collect(store, keep)
    collect(store, keep)

    assert 40 not in steps(store, "r")
    for ref in ("r@50", "r@60"):
        for policy in ("parity", "filter"):
            for layer, choice in store.compose(ref, policy=policy).layers.items():
                assert choice.step > 30 or choice.step == mix.layers[layer].step, (ref, policy, layer)
