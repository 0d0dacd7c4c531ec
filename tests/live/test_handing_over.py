"""One run goes from ZeRO-3 to FSDP2 and back, without a folder between: each goes on from the very numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerstore import Store
from tests.forked import Event, Launch, Nursery


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the store lies."""
    return tmp_path_factory.mktemp("handing_over")


@pytest.fixture(scope="module")
def launch(ranks: Nursery, folder: Path) -> Launch:
    """Return what two ranks have told."""
    options = {"store": str(folder / "store"), "out": str(folder / "composed")}
    with ranks.launch("tests.live.handing_over:there_and_back", options, folder=folder, name="ranks") as launched:
        return launched.done()


def only(launch: Launch, kind: str) -> list[Event]:
    """Return what every rank has told of that *kind*."""
    found = launch.events(kind)
    assert len(found) == launch.count
    return found


def test_fsdp2_goes_on_from_what_zero_3_saved(launch: Launch) -> None:
    """Masters and moments are the same to the last bit, and what the user kept is there."""
    for event in only(launch, "there"):
        assert (event["same"], event["kept"], event["step"]) == (True, {"epoch": 2}, 2)


def test_zero_3_goes_on_from_what_fsdp2_saved(launch: Launch) -> None:
    """Masters and moments are the same to the last bit; DeepSpeed's own state is counted on."""
    for event in only(launch, "back"):
        assert (event["same"], event["kept"], event["steps"]) == (True, {"epoch": 40}, 4)
    for event in only(launch, "notes"):
        assert "DeepSpeed's own state comes from sft@2, advanced by 2 updates" in event["notes"]


def test_layers_of_several_saves_go_on_under_zero_3(launch: Launch) -> None:
    """Those that a policy left out are of the save before."""
    [due, _] = only(launch, "mixed")
    for event in only(launch, "mixture"):
        assert {layer for layer, step in event["layers"].items() if step == 5} == set(due["due"])
        assert {*event["layers"].values()} == {4, 5}


def test_shards_are_composed_of_what_fsdp2_saved(launch: Launch) -> None:
    """DeepSpeed loads them from a folder, with the same numbers and counters."""
    for event in only(launch, "folder"):
        assert (event["same"], event["steps"]) == (True, 4)


def test_all_of_it_is_one_run(launch: Launch, folder: Path) -> None:
    """Whose commits follow each other, whoever saved them; nothing is damaged."""
    assert launch.events("loss")
    with Store(folder / "store") as store:
        saved = {entry.step: store.show(entry.commit).is_dcp for entry in store.log("sft")}
        assert saved == {2: False, 4: True, 5: True, 6: False}
        assert store.verify(read_data=True).ok
