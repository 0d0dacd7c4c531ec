"""Promises of an ingest about what the store has already: it is read, and what has rotted is replaced."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import IntegrityError
from layerstore.history.references import resolve
from tests.faults.harness import flip, object_of
from tests.generated import generate


@pytest.fixture(scope="module")
def pristine(fast_module_path: Path) -> Path:
    """Return a folder with the checkpoint ``10`` and a store that has it as r@10; to be copied."""
    generate(fast_module_path / "10", layers=2, hidden=8, vocab=8, step=10, layout="hf")
    with layerstore.init(fast_module_path / "store") as made:
        made.ingest(fast_module_path / "10", run="r")
    return fast_module_path


@pytest.fixture
def folder(pristine: Path, fast_path: Path) -> Path:
    """Return a copy of it all."""
    shutil.copytree(pristine, fast_path / "here")
    return fast_path / "here"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """Return the copied store."""
    with Store(folder / "store") as opened:
        yield opened


def layer_object(store: Store) -> Path:
    """Return the file of a layer's numbers."""
    return object_of(store, "r@10", "lm_head")


def version_blob(store: Store) -> Path:
    """Return the file of a layer's version."""
    return store.repo.layout.object(resolve(store.repo, "r@10").record.layers[0].version.id)


def state_blob(store: Store) -> Path:
    """Return the file of a rank's state."""
    return store.repo.layout.object(resolve(store.repo, "r@10").record.states[0].id)


def truncate(path: Path) -> None:
    """Cut the file short."""
    os.truncate(path, path.stat().st_size - 1)


KINDS = [layer_object, version_blob, state_blob]


@pytest.mark.fault(35)
@pytest.mark.parametrize("run", ["r", "other"])
@pytest.mark.parametrize("harm", [flip, truncate])
@pytest.mark.parametrize("kind", KINDS)
def test_rot_that_is_reused_is_replaced(
    store: Store, folder: Path, kind: Callable[[Store], Path], harm: Callable[[Path], None], run: str
) -> None:
    """Whatever it is and whichever run asks: the bytes in hand take its place, and that is told."""
    path = kind(store)
    harm(path)

    ingested = store.ingest(folder / "10", run=run)

    assert (ingested.objects_healed, ingested.reused_read) == (1, True)
    assert any("1 object in the store was damaged" in note and path.name in note for note in ingested.notes)
    assert store.verify(read_data=True).ok
    store.compose(f"{run}@10").write(folder / "out")
    assert not list((store.path / "tmp").iterdir())


@pytest.mark.fault(35)
def test_all_of_it_may_have_rotted(store: Store, folder: Path) -> None:
    """Every object and blob is replaced by one ingest; the next one finds them sound and writes nothing."""
    files = [path for path in (store.path / "objects").rglob("*") if path.is_file()]
    for path in files:
        flip(path)

    healed = store.ingest(folder / "10", run="r")
    again = store.ingest(folder / "10", run="r")

    assert len(files) == healed.objects_healed == healed.objects_new
    assert (again.objects_new, again.objects_healed, again.notes) == (0, 0, ())
    assert store.verify(read_data=True).ok


@pytest.mark.fault(35)
def test_rot_of_a_save_that_an_attempt_left_is_replaced(store: Store, folder: Path) -> None:
    """The checkpoint is known as that of the earlier attempt: no commit is added, its object is healed all the same."""
    flip(layer_object(store))
    generate(folder / "5", layers=2, hidden=8, vocab=8, step=5, seed=5, layout="hf")
    store.ingest(folder / "5", run="r", rollback=True)

    ingested = store.ingest(folder / "10", run="r")

    assert ingested.objects_healed == 1
    assert store.verify(read_data=True).ok


@pytest.mark.fault(35)
def test_a_trusted_store_is_not_read(store: Store, folder: Path) -> None:
    """The size has to do: rot stays where it is, and whoever asked for that is told that nothing was read."""
    flip(layer_object(store))

    ingested = store.ingest(folder / "10", run="other", trust_store=True)

    assert (ingested.objects_healed, ingested.reused_read) == (0, False)
    with pytest.raises(IntegrityError, match="is damaged"):
        store.compose("other@10").write(folder / "out")


@pytest.mark.fault(38)
def test_a_link_in_the_place_of_an_object_is_refused(store: Store, folder: Path) -> None:
    """It is nobody's rot: it is neither followed nor replaced."""
    path = layer_object(store)
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")

    with pytest.raises(IntegrityError, match="is not a regular file"):
        store.ingest(folder / "10", run="other")
    assert path.is_symlink()


@pytest.mark.fault(49)
def test_what_a_repair_takes_away_meanwhile_is_written_all_the_same(store: Store, folder: Path) -> None:
    """The ingest has found the rot before it, and has the bytes: nothing of it is missing afterwards."""
    damaged = layer_object(store)
    flip(damaged)

    def meanwhile(operation: str, path: Path) -> None:
        if (operation, path) == ("mkdir", damaged.parent):
            with layerstore.open(store.path) as repairing:
                repairing.repair(read_data=True)

    with Store(store.path, hook=meanwhile) as ingesting:
        ingesting.ingest(folder / "10", run="other")

    assert not list((store.path / "quarantine").glob("*/commits"))
    assert damaged.is_file()
    assert store.verify(read_data=True).ok
