"""A rank that saves a module dies: nothing half is seen, and training goes on from the save before."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from tests.forked import Nursery
from tests.live.module.launched import launched

pytestmark = pytest.mark.timeout(600)

FORMS = {"fsdp": 2, "ddp": 2, "hsdp": 4, "tensor": 4}


@pytest.fixture(scope="module")
def losses(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[str]]]:
    """Return what every rank's losses are in each form if nobody is killed, as they are asked for."""
    folder, found = tmp_path_factory.mktemp("undisturbed"), dict[str, list[list[str]]]()
    for form, count in FORMS.items():
        launch = launched(ranks, folder, "undisturbed", count=count, form=form, name=form)
        found[form] = [event["losses"] for event in sorted(launch.events("losses"), key=lambda event: event["rank"])]
    return found


@pytest.mark.sample(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["copy", "write", "part", "commit"])
def test_a_killed_save_is_never_seen_and_the_next_launch_goes_on(
    ranks: Nursery, tmp_path: Path, losses: dict[str, list[list[str]]], where: str, form: str
) -> None:
    """The losses after it are those of a training that nobody has stopped."""
    count = FORMS[form]
    options = {"store": str(tmp_path / "store"), "form": form, "where": where}
    layerstore.init(tmp_path / "store").close()
    with ranks.launch(
        "tests.live.module.programs:killed", options, folder=tmp_path, name="killed", count=count
    ) as launch:
        launch.until("held")
        launch.kill(0 if where == "commit" else count - 1)
        launch.kill()
        assert set(launch.statuses()) == {-9}, launch.tail()
    with Store(tmp_path / "store") as store:
        assert [entry.step for entry in store.log("sft")] == [2]
        assert store.verify(read_data=True).ok

    again = launched(ranks, tmp_path, "requeued", count=count, form=form)

    assert {event["step"] for event in again.events("losses")} == {2}
    found = {event["rank"]: event["losses"] for event in again.events("losses")}
    assert found == {rank: own[2:] for rank, own in enumerate(losses[form])}
    with Store(tmp_path / "store") as store:
        assert [entry.step for entry in store.log("sft")] == [3, 2]
        assert store.verify(read_data=True).ok
