"""Promises about pins that are damaged: a copy of the store heals them, with all that they alone need."""

import shutil
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.model import Pin
from layerstore.ops.refs import resolve
from layerstore.storage.commits import RecordStore
from tests.faults.harness import flip, masters, object_of
from tests.generated import generate


@pytest.fixture(scope="module")
def pristine(fast_module_path: Path) -> Path:
    """Return a folder with checkpoints by step and ``other``, of step 20 too, and a store with r@10 and r@20."""
    for name, step, seed in (("10", 10, 10), ("20", 20, 20), ("30", 30, 30), ("other", 20, 7)):
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
    """More than that it cannot be read: the checkpoint of that step heals the rest."""
    store.pin("best", "r@20")
    lost = object_of(store, "r@20", "model.layers.1")
    copy = shutil.copytree(store.path, folder / "copy")
    (copy / lost.relative_to(store.path)).unlink()
    flip(store.path / "pins" / "best")
    store.drop("r@20")
    lost.unlink()

    done = store.repair(sources=[copy])

    assert [(cost.holder, cost.layers) for cost in done.lost] == [("best", ("model.layers.1",))]
    assert (done.lost_records, done.held_back) == ((), ())
    [again] = done.reingest
    assert (again.run, again.step) == ("r", 20)  # that place is free: nothing shows there
    store.ingest(folder / "20", run=again.run)
    assert store.verify(read_data=True).ok


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
@pytest.mark.parametrize("became", ["fell back", "trimmed", "replaced"])
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
    elif became == "trimmed":
        store.ingest(folder / "30", run="r")
        store.gc(Keep(drop_optimizer_older_than=5), grace_seconds=0)
    lost.unlink()

    done = store.repair(fall_back=became == "fell back")

    assert [cost.holder for cost in done.lost] == ["best"]
    [again] = done.reingest
    assert (again.reference, again.run, again.policy) == ("r@20", None, None)
    store.ingest(folder / "20", run="other")
    assert store.verify(read_data=True).ok
