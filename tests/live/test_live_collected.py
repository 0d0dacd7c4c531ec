"""What a run need not keep goes while it trains, and what is taken from under a saver is saved again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import layerstore
from layerstore.store import Store
from tests.forked import Launch, Nursery
from tests.live.faulty import RUN, STEPS
from tests.live.faulty_collected import LOST_RUN
from tests.live.heard import losses


@pytest.fixture(scope="module")
def collected(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launch, Store]]:
    """Return what the ranks told, and the store that they left."""
    folder = tmp_path_factory.mktemp("collected")
    options = {"store": str(folder / "store")}
    with layerstore.init(folder / "store") as store:
        with ranks.launch("tests.live.faulty_collected:collected", options, folder=folder, name="collected") as launch:
            launch.done()
        yield launch, store


def test_what_a_run_need_not_keep_goes_while_it_trains(
    collected: tuple[Launch, Store], undisturbed: dict[int, str]
) -> None:
    """The rules of ``keep`` hold when the saver is closed, what is kept is whole, and training did not notice."""
    launch, store = collected
    assert [entry.step for entry in store.log(RUN)] == [STEPS, STEPS - 1, 3]
    assert store.verify(read_data=True).ok
    assert {choice.step for choice in store.compose(RUN).layers.values()} == {STEPS, STEPS - 1}
    # What the store has besides is what the other run left to be collected.
    assert store.gc(grace_seconds=0).removed == []
    told = {event["name"]: event for event in launch.events("status") if event["rank"] == 0}
    assert (told[""]["saved"], told[""]["errors"]) == (STEPS, [])
    assert {step: loss for step, loss in losses(launch).items() if step > 3} == {
        step: loss for step, loss in undisturbed.items() if step > 3
    }


def test_a_saver_that_lost_what_it_would_inherit_saves_everything(collected: tuple[Launch, Store]) -> None:
    """The save that needed it is given up, and says so; the next one is full, and those after go on as before."""
    launch, store = collected
    due = {
        event["step"]: len(event["due"])
        for event in launch.events("saved")
        if event["name"] == LOST_RUN and event["rank"] == 0
    }
    told = {event["name"]: event for event in launch.events("status") if event["rank"] == 0}[LOST_RUN]
    assert (told["saved"], told["failed"]) == (2, 1)
    assert "that was to be inherited is gone" in told["errors"][0]
    assert sorted((entry.attempt, entry.step) for entry in store.log(LOST_RUN)) == [(1, 3), (2, 4), (2, 5)]
    assert due[4] == len(store.compose(f"{LOST_RUN}@4").layers) > due[5] > 0
    assert store.verify(read_data=True).ok
