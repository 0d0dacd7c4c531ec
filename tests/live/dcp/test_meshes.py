"""What FSDP2, HSDP and tensor parallelism save on any number of ranks is loaded on every other one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.arrays import TensorKind
from tests.forked import Launch, Nursery
from tests.live.dcp.meshes import SAVED_AT
from tests.live.module.models import MESHES

RUNS = [f"{form}{count}" for count, forms in MESHES.items() for form in forms]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the store and torch's folders lie."""
    return tmp_path_factory.mktemp("meshes")


def launched(ranks: Nursery, folder: Path, program: str, *, count: int, **more: object) -> Launch:
    """Return what the ranks of *program* have told."""
    options = {"store": str(folder / "store"), "out": str(folder / "plain"), **more}
    name = f"{program}-{count}"
    with ranks.launch(f"tests.live.dcp.meshes:{program}", options, folder=folder, name=name, count=count) as launch:
        return launch.done()


@pytest.fixture(scope="module")
def saved(ranks: Nursery, folder: Path) -> dict[int, Launch]:
    """Return what was told by those that have saved, by their number."""
    return {count: launched(ranks, folder, "everywhere", count=count) for count in MESHES}


@pytest.fixture(scope="module")
def loaded(saved: dict[int, Launch], ranks: Nursery, folder: Path) -> dict[int, Launch]:
    """Return what was told by those that have loaded, by their number."""
    return {count: launched(ranks, folder, "from_everywhere", count=count) for count in saved}


def losses(launches: dict[int, Launch]) -> dict[tuple[str, int], list[str]]:
    """Return the losses of every rank of every mesh."""
    events = (event for launch in launches.values() for event in launch.events("losses"))
    return {(event["run"], event["rank"]): event["losses"] for event in events}


@pytest.mark.parametrize("on", RUNS)
@pytest.mark.parametrize("run", RUNS)
def test_every_mesh_loads_what_every_mesh_has_saved(loaded: dict[int, Launch], run: str, on: str) -> None:
    """All tensors and values are those that torch's own save and load of the same state give."""
    found = [
        event
        for launch in loaded.values()
        for event in launch.events("compared")
        if (event["run"], event["on"]) == (run, on)
    ]

    assert len(found) == int(on[-1])
    assert [event["other"] for event in found] == [[]] * len(found)
    assert {event["keys"] for event in found} == {found[0]["keys"]}
    assert found[0]["keys"] > 60


def test_training_goes_on_with_the_same_losses(saved: dict[int, Launch], loaded: dict[int, Launch]) -> None:
    """On the same mesh, to the last bit and on every rank."""
    expected = losses(saved)

    assert len(expected) == sum(int(run[-1]) for run in RUNS)
    assert losses(loaded) == expected


def test_a_save_of_any_mesh_is_a_whole_commit(loaded: dict[int, Launch], folder: Path) -> None:
    """Nothing is missing, nothing is damaged, and all have the same layers."""
    assert loaded
    with Store(folder / "store") as store:
        assert store.verify(read_data=True).ok
        layers = [list(store.compose(run).layers) for run in RUNS]
        assert layers == layers[:1] * len(RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_arrays_are_those_of_torchs_own_folder(saved: dict[int, Launch], folder: Path, run: str) -> None:
    """However the mesh has cut them: by rows, or by columns."""
    assert saved
    with Store(folder / "store") as store:
        store.ingest(folder / "plain" / run, run=f"plain-{run}", step=SAVED_AT)
        kinds: tuple[TensorKind, ...] = ("master", "optimizer")
        for kind in kinds:
            found, expected = (store.compose(name).tensors(kind) for name in (run, f"plain-{run}"))
            assert {name: found[name].tobytes() for name in found} == {
                name: expected[name].tobytes() for name in expected
            }


def test_saves_while_ranks_train_on_hold_what_was_staged(ranks: Nursery, tmp_path: Path) -> None:
    """And those with a policy have, layer by layer, what full saves of the same steps have."""
    launch = launched(ranks, tmp_path, "going_on", count=2)

    assert [(event["same"], event["moved"]) for event in launch.events("same")] == [(True, True)] * 6
    with Store(tmp_path / "store") as store:
        layers = store.compose("half@3").layers
        assert {of.step for of in layers.values()} == {2, 3}
        for name, of in layers.items():
            assert of.version == store.compose(f"async@{of.step}").layers[name].version


@pytest.mark.parametrize(("operation", "part"), [("write", "/tmp/"), ("link", "/objects/")])
def test_a_rank_that_is_killed_while_it_writes_leaves_nothing_to_be_seen(
    ranks: Nursery, tmp_path: Path, operation: str, part: str
) -> None:
    """The run has what it had before, and the next save of the same step succeeds."""
    options = {"store": str(tmp_path / "store"), "operation": operation, "part": part}
    layerstore.init(tmp_path / "store").close()
    with ranks.launch("tests.live.dcp.meshes:held", options, folder=tmp_path, name="held") as launch:
        launch.until("held")
        launch.kill(1)
        statuses = launch.statuses()
    assert statuses[1] == -9, launch.tail()
    assert not launch.events("worked")
    with Store(tmp_path / "store") as store:
        assert [entry.step for entry in store.log("sft")] == [1]

    again = launched(ranks, tmp_path, "on", count=2)

    assert [event["same"] for event in again.events("same")] == [True, True]
    with Store(tmp_path / "store") as store:
        assert [entry.step for entry in store.log("sft")] == [2, 1]
        assert store.verify(read_data=True).ok
