"""Promises about pins that are damaged: a copy of the store heals them, with all that they alone need."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import IntegrityError
from layerstore.model import CommitRecord, Pin
from layerstore.check.mending import Work
from layerstore.history.references import resolve
from layerstore.storage.commits import RecordStore
from layerstore.storage.objects import ObjectWriter
from tests.faults.harness import flip, masters, object_of
from tests.generated import generate


def truncated(path: Path) -> None:
    """Cut it in half."""
    os.truncate(path, path.stat().st_size // 2)


def become_folder(path: Path) -> None:
    """Put a folder in its place."""
    path.unlink()
    path.mkdir()


@pytest.fixture(scope="module")
def pristine(fast_module_path: Path) -> Path:
    """Return a folder with checkpoints by step and ``other``, of step 20 too, and a store with r@10 and r@20."""
    for name, step, seed in (("10", 10, 10), ("20", 20, 20), ("30", 30, 30), ("40", 40, 40), ("other", 20, 7)):
        generate(fast_module_path / name, layers=2, hidden=8, vocab=8, step=step, seed=seed)
    with layerstore.init(fast_module_path / "store") as made:
        for step in (10, 20):
            made.ingest(fast_module_path / str(step), run="r")
    return fast_module_path


@pytest.mark.fault(103)
@pytest.mark.parametrize("is_repaired", [False, True])
def test_a_lost_pin_is_healed_by_a_copy_of_its_store(store: Store, folder: Path, *, is_repaired: bool) -> None:
    """With what it alone needs, also where an earlier repair without the copy has put it into quarantine."""
    store.ingest(folder / "30", run="r")
    store.pin("best", "r@30")
    before = masters(store, "best")
    copy = shutil.copytree(store.path, folder / "copy")
    flip(store.path / "pins" / "best")
    store.drop("r@30")
    if is_repaired:
        assert store.repair().held_back == ("best",)
    object_of(store, "r@20", "model.layers.1").unlink()
    planned = store.repair(sources=[copy], dry_run=True)

    done = store.repair(sources=[copy])

    pins = [(each.path, each.origin) for each in done.healed if each.kind == "pin"]
    assert pins == [("pins/best", str(copy))]
    assert {each.path for each in planned.healed} == {each.path for each in done.healed}
    assert (done.held_back, done.lost_records, done.has_lost) == ((), (), False)
    assert [file.path for file in done.quarantined] == ([] if is_repaired else ["pins/best"])
    assert store.verify(read_data=True).ok
    store.gc(grace_seconds=0)
    assert masters(store, "best") == before
    assert not store.repair(sources=[copy]).has_done


@pytest.mark.fault(103)
def test_a_pin_is_healed_with_objects_that_are_gone_too(store: Store, folder: Path) -> None:
    """In one repair: what it names is looked at before it is written, and after."""
    store.pin("best", "r@20")
    shutil.copytree(store.path, folder / "copy")
    flip(store.path / "pins" / "best")
    version = resolve(store.rooms, "r@20").record.layers[0].version
    store.drop("r@20")
    for gone in (version.id, store.rooms.version(version).objects[0].id):
        store.rooms.layout.object(gone).unlink()
    planned = store.repair(sources=[folder / "copy"], dry_run=True)

    done = store.repair(sources=[folder / "copy"])

    assert sorted(each.kind for each in done.healed) == ["object", "object", "pin"]
    assert {each.path for each in planned.healed} == {each.path for each in done.healed}
    assert store.verify(read_data=True).ok
    assert not done.has_lost


@pytest.mark.fault(103)
def test_a_pin_of_which_objects_are_lost_says_which(store: Store, folder: Path) -> None:
    """It stays lost, as a record does; the checkpoint of that step heals the rest, and then the copy the pin."""
    store.pin("best", "r@20")
    before = masters(store, "best")
    lost = object_of(store, "r@20", "model.layers.1")
    copy = shutil.copytree(store.path, folder / "copy")
    (copy / lost.relative_to(store.path)).unlink()
    flip(store.path / "pins" / "best")
    store.drop("r@20")
    lost.unlink()
    planned = store.repair(sources=[copy], dry_run=True)

    done = store.repair(sources=[copy])

    assert [(cost.holder, cost.layers) for cost in done.lost] == [("best", ("model.layers.1",))]
    assert planned.lost == done.lost
    assert planned.reingest == done.reingest
    assert (done.lost_records, done.held_back) == (("best",), ("best",))
    [again] = done.reingest
    assert (again.run, again.step) == ("r", 20)  # that place is free: nothing shows there
    store.ingest(folder / "20", run=again.run)
    assert store.repair(sources=[copy]).held_back == ()
    assert store.verify(read_data=True).ok
    assert masters(store, "best") == before


@pytest.mark.fault(103)
def test_the_pin_of_another_store_heals_nothing(store: Store, folder: Path) -> None:
    """Its name may mean anything there."""
    with layerstore.init(folder / "stranger") as other:
        other.ingest(folder / "10", run="r")
        other.pin("best", "r@10")
    store.pin("best", "r@10")
    flip(store.path / "pins" / "best")

    done = store.repair(sources=[folder / "stranger"])

    assert (done.healed, done.held_back) == ((), ("best",))


@pytest.mark.fault(103)
def test_a_pin_that_is_named_again_while_a_repair_runs_stays(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's word is newer than any copy."""
    store.pin("best", "r@10")
    shutil.copytree(store.path, folder / "copy")
    flip(store.path / "pins" / "best")
    restore = RecordStore.restore_pin

    def slow(self: RecordStore, pin: Pin) -> bool:
        monkeypatch.undo()
        with layerstore.open(store.path) as other:
            other.pin("best", "r@20")
        return restore(self, pin)

    monkeypatch.setattr(RecordStore, "restore_pin", slow)

    done = store.repair(sources=[folder / "copy"])

    assert (done.healed, done.has_lost) == ((), False)
    [pin] = store.pins()
    assert (pin.name, pin.record.step) == ("best", 20)


@pytest.mark.fault(103)
@pytest.mark.parametrize("place", [0, 40, 200, -1])
def test_what_is_left_of_a_pin_proves_which_it_was(store: Store, folder: Path, place: int) -> None:
    """Its checksum, or all else where that is damaged: of several copies the one of that time heals it."""
    copies: list[Path] = []
    for step in (10, 20, 10):
        store.pin("best", f"r@{step}")
        copies.append(shutil.copytree(store.path, folder / f"copy {len(copies)}"))
        store.delete_pin("best")
    shutil.copy(copies[1] / "pins" / "best", store.path / "pins" / "best")
    flip(store.path / "pins" / "best", place)

    done = store.repair(sources=copies)

    assert [(each.path, each.origin) for each in done.healed] == [("pins/best", str(copies[1]))]
    assert (done.pins_elsewhere, done.held_back) == ((), ())
    assert [pin.record.step for pin in store.pins()] == [20]


@pytest.mark.fault(103)
def test_a_pin_that_was_moved_since_the_copy_is_not_taken_back(store: Store, folder: Path) -> None:
    """What it has kept since would go with the next collection, without a word."""
    store.pin("best", "r@10")
    copy = shutil.copytree(store.path, folder / "copy")
    store.delete_pin("best")
    store.pin("best", "r@20")
    flip(store.path / "pins" / "best")

    for is_first in (True, False):
        done = store.repair(sources=[copy])

        assert (done.healed, done.held_back, done.has_done) == ((), ("best",), is_first)
        assert [(each.name, each.reference, each.store) for each in done.pins_elsewhere] == [
            ("best", "r@10", str(copy))
        ]
    with pytest.raises(IntegrityError, match="pin 'best'"):
        store.gc(grace_seconds=0)
    store.pin("best", "r@20")
    assert store.repair(sources=[copy]).pins_elsewhere == ()
    store.gc(grace_seconds=0)


@pytest.mark.fault(103)
@pytest.mark.parametrize("harm", [Path.unlink, truncated, become_folder], ids=lambda harm: harm.__name__)
def test_a_pin_of_which_too_little_is_left_is_named_by_its_user(
    store: Store, folder: Path, harm: Callable[[Path], None]
) -> None:
    """Where nothing is left at its place nobody misses it, as if it had been deleted."""
    store.pin("best", "r@20")
    copy = shutil.copytree(store.path, folder / "copy")
    harm(store.path / "pins" / "best")

    done = store.repair(sources=[copy])

    assert done.healed == ()
    is_missed = harm != Path.unlink
    assert (done.held_back, [each.reference for each in done.pins_elsewhere]) == (
        (("best",), ["r@20"]) if is_missed else ((), [])
    )


@pytest.mark.fault(103)
def test_a_lost_pin_whose_name_a_run_has_by_now_stays_lost(store: Store, folder: Path) -> None:
    """No reference would find it, and the run could not go on."""
    store.pin("best", "r@20")
    copy = shutil.copytree(store.path, folder / "copy")
    flip(store.path / "pins" / "best")
    store.repair()
    store.ingest(folder / "30", run="best")

    done = store.repair(sources=[copy])

    assert (done.healed, done.held_back, store.pins()) == ((), ("best",), [])
    store.ingest(folder / "40", run="best")
    store.delete_pin("best")
    assert not store.repair(sources=[copy]).has_lost


@pytest.mark.fault(103)
def test_a_pin_that_is_given_up_while_a_repair_runs_stays_so(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was looked for before."""
    store.pin("best", "r@10")
    copy = shutil.copytree(store.path, folder / "copy")
    flip(store.path / "pins" / "best")
    store.repair()
    look = Work._claim

    def slow(self: Work, writer: ObjectWriter, record: CommitRecord) -> bool:
        with layerstore.open(store.path) as other:
            other.delete_pin("best")
        return look(self, writer, record)

    monkeypatch.setattr(Work, "_claim", slow)

    done = store.repair(sources=[copy])

    assert (done.healed, done.has_lost, store.pins()) == ((), False, [])


@pytest.mark.fault(103)
def test_a_pin_is_named_while_a_repair_takes_the_last_one_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the empty folder, which nobody else would make again."""
    store.pin("best", "r@10")
    flip(store.path / "pins" / "best")
    check = RecordStore.check_store

    def slow(self: RecordStore) -> None:
        monkeypatch.undo()
        with layerstore.open(store.path) as other:
            other.repair()
        assert not (store.path / "pins").exists()
        check(self)

    monkeypatch.setattr(RecordStore, "check_store", slow)
    store.pin("second", "r@20")
    assert [pin.name for pin in store.pins()] == ["second"]


@pytest.mark.fault(103)
def test_who_deletes_a_pin_and_is_stopped_has_not_lost_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one of that name may lie in quarantine: that goes first, or it would be taken for lost."""
    store.pin("best", "r@10")
    flip(store.path / "pins" / "best")
    store.repair()
    store.pin("best", "r@20")

    def stopped(self: RecordStore, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordStore, "delete_pin", stopped)
    with pytest.raises(KeyboardInterrupt):
        store.delete_pin("best")
    monkeypatch.undo()
    assert (store.verify().ok, [pin.name for pin in store.pins()]) == (True, ["best"])
    store.delete_pin("best")
    store.gc(grace_seconds=0)
    assert (store.verify().ok, store.pins()) == (True, [])


@pytest.mark.fault(103)
@pytest.mark.parametrize("became", ["fell back", "trimmed", "replaced", "rolled back", "rolled back and dropped"])
def test_what_only_a_pin_has_lost_is_healed_by_an_ingest_under_another_run(
    store: Store, folder: Path, became: str
) -> None:
    """Its own has something else there by now: the same checkpoint would add nothing, or be refused."""
    # A collection takes no moments of a commit that is pinned as it stands.
    pinned = store.compose("r@20", policy="parity" if became == "trimmed" else "latest")
    pinned.pin("best")
    layer = next(layer for layer, taken in pinned.layers.items() if taken.step == 20)
    lost = object_of(store, "r@20", layer, "optimizer")
    if became == "replaced":
        store.ingest(folder / "other", run="r", replace=True)
    elif became.startswith("rolled back"):
        store.ingest(folder / "other", run="r", rollback=True)
        if became.endswith("dropped"):
            store.drop("r~1@20")
    elif became == "trimmed":
        store.ingest(folder / "30", run="r")
        store.gc(Keep(drop_optimizer_older_than=5), grace_seconds=0)
    lost.unlink()

    done = store.repair(fall_back=became == "fell back")

    assert "best" in [cost.holder for cost in done.lost]
    [again] = done.reingest
    assert (again.step, again.run, again.policy) == (20, None, None)
    store.ingest(folder / "20", run="other")
    assert store.verify(read_data=True).ok
