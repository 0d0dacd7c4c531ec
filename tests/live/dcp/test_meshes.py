"""What ranks on a mesh save while they train on is what was staged, and a killed save is as if it had not begun."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from tests.forked import Launch, Nursery

pytestmark = pytest.mark.timeout(900)


def launched(ranks: Nursery, folder: Path, program: str, *, count: int, **more: object) -> Launch:
    """Return what the ranks of *program* have told."""
    options = {"store": str(folder / "store"), "out": str(folder / "plain"), **more}
    name = f"{program}-{count}"
    with ranks.launch(f"tests.live.dcp.meshes:{program}", options, folder=folder, name=name, count=count) as launch:
        return launch.done()


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
