"""Ranks die while they save: what was whole stays whole, what was torn is never seen, and the next launch goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore.store import Store
from tests.forked import Launch, Nursery
from tests.live.faulty import LOST_RUN, PUSHED_RUN
from tests.live.launched import due, losses, one
from tests.live.tiny import RUN, STEPS

PROGRAMS = "tests.live.faulty"
LAYERS = 6


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a new store."""
    layerstore.init(tmp_path / "store").close()
    return tmp_path / "store"


def steps(store: Path, ref: str = RUN) -> list[int]:
    """Return the steps that are visible in the history of *ref*, after checking every byte of the store."""
    with Store(store) as opened:
        assert opened.verify(read_data=True).damaged == ()
        return sorted(entry.step for entry in opened.log(ref))


# What is stopped when the ranks are killed: by operation, path and ranks; and the newest step that is visible then.
POINTS = {
    "all-while-writing": ("write", "/tmp/", (0, 1), 3),
    "before-one-part": ("link", "/parts/", (1,), 3),
    "before-the-record": ("link", "/commits/", (0,), 3),
    "before-the-record-is-durable": ("fsync", "/commits/", (0,), 4),
    "before-parts-are-removed": ("unlink", "/parts/", (0,), 4),
}


@pytest.mark.fault(104, 105)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sample(3)
def test_a_killed_save_is_never_seen_and_the_next_launch_goes_on(
    point: str, ranks: Nursery, store: Path, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Earlier commits are whole, and the trajectory after the resume is the undisturbed one, bit for bit."""
    operation, part, stopped, newest = POINTS[point]
    options = {"store": str(store), "policy": "latest", "operation": operation, "part": part, "ranks": stopped}

    with ranks.launch(f"{PROGRAMS}:killed", options, folder=tmp_path, name="killed") as killed:
        killed.until("held", count=len(stopped))
        killed.kill()
        assert killed.statuses() == [-9, -9], killed.tail()

    assert steps(store) == list(range(1, newest + 1))
    assert os.listdir(store / "parts") != []  # nobody minds them

    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued") as requeued:
        requeued.done()

    assert one(requeued, "resumed")["step"] == newest
    assert one(requeued, "resumed")["client_state"] == {"epoch": newest}
    expected = {step: loss for step, loss in undisturbed.items() if step > newest}
    assert losses(requeued) == expected
    assert due(requeued) == {step: due(killed)[1] for step in expected}
    assert steps(store) == list(range(1, STEPS + 1))
    assert one(requeued, "status")["errors"] == []


@pytest.mark.fault(104)
def test_one_rank_dies_alone(ranks: Nursery, store: Path, tmp_path: Path) -> None:
    """The other one cannot commit without it, nor waits for it for ever; what was due is due again."""
    options = {"store": str(store), "policy": "parity", "operation": "write", "part": "/tmp/", "ranks": (1,)}

    with ranks.launch(f"{PROGRAMS}:killed", options, folder=tmp_path, name="killed") as killed:
        killed.until("held")
        killed.kill(1)
        assert killed.statuses()[1] == -9, killed.tail()

    assert steps(store) == [1, 2, 3]
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued") as requeued:
        requeued.done()
    assert due(requeued)[4] == due(killed)[4]
    assert len(due(requeued)[4]) == LAYERS // 2
    assert steps(store) == list(range(1, STEPS + 1))
    with Store(store) as opened:
        found = {line.layer: line.step for line in opened.ls(f"{RUN}@4")}
    assert found == {layer: 4 if layer in due(killed)[4] else 3 for layer in found}


@pytest.mark.fault(104)
def test_what_was_left_is_in_no_composite(
    ranks: Nursery, store: Path, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """After a rollback and a kill the newest attempt goes on; layers of the abandoned one are never taken."""
    options = {"store": str(store), "policy": "parity"}
    with ranks.launch(f"{PROGRAMS}:rolled_back", options, folder=tmp_path, name="back") as back:
        back.until("held", count=2)
        back.kill()
        back.until("ended")
    assert losses(back, "first") == {step: loss for step, loss in undisturbed.items() if step <= 6}
    assert losses(back, "second")[4] != losses(back, "first")[4]

    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued") as requeued:
        requeued.done()
    with ranks.launch(f"{PROGRAMS}:begun_anew", options, folder=tmp_path, name="anew") as anew:
        anew.done()

    assert one(requeued, "resumed")["step"] == 4
    # The torn save's number is given again; so its half is what is due.
    assert due(requeued)[5] == due(back, "second")[5]
    assert [len(layers) for layers in due(anew, "anew").values()] == [LAYERS, LAYERS // 2]
    with Store(store) as opened:
        assert opened.verify(read_data=True).damaged == ()
        entries = {(entry.attempt, entry.step) for entry in opened.log(RUN)}
        assert entries == {(3, 1), (3, 2), *((2, step) for step in range(3, 8)), *((1, step) for step in range(1, 7))}
        assert opened.show(f"{RUN}@2").fork is None
        for policy in ("latest", "parity", "filter"):
            for ref, attempt, fork in ((f"{RUN}~1", 2, 2), (f"{RUN}~2", 1, 0)):
                if policy == "filter" and ref.endswith("2"):
                    continue
                composite = opened.compose(ref, policy=policy)
                assert composite.composition.base.attempt == attempt
                origins = {(entry.origin.attempt, entry.origin.step) for entry in composite.composition.layers}
                assert all(own == attempt or (own == 1 and step <= fork) for own, step in origins), (policy, origins)
            assert {entry.origin.attempt for entry in opened.compose(RUN, policy=policy).composition.layers} == {3}


def test_a_number_that_is_given_again_is_not_given_up_again(ranks: Nursery, store: Path, tmp_path: Path) -> None:
    """An engine that goes back under its saver saves on, whatever was given up before."""
    with ranks.launch(f"{PROGRAMS}:back_and_forth", {"store": str(store)}, folder=tmp_path, name="back") as launch:
        launch.done()

    assert len(one(launch, "status")["errors"]) == 1
    with Store(store) as opened:
        assert opened.verify(read_data=True).damaged == ()
        entries = sorted((entry.attempt, entry.step) for entry in opened.log(RUN))
    assert entries == [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4)]
    assert os.listdir(store / "parts") == []


@pytest.mark.parametrize("how", ["exit", "exception", "end"])
def test_a_process_that_ends_takes_no_save_along(how: str, ranks: Nursery, store: Path, tmp_path: Path) -> None:
    """Whatever ends the program, what is on its way comes to the disk first."""
    options = {"store": str(store), "how": how}
    with ranks.launch(f"{PROGRAMS}:ended", options, folder=tmp_path, name=how) as launch:
        launch.statuses()  # gloo's own end may abort

    assert steps(store) == [2]


def test_a_rank_that_is_aborted_leaves_its_stack(ranks: Nursery, tmp_path: Path) -> None:
    """A test that fails for it shows where that was, whatever others say afterwards."""
    with ranks.launch(f"{PROGRAMS}:aborted", {}, folder=tmp_path, name="aborted") as launch:
        assert launch.statuses() == [0, -6], launch.tail()

    assert "Fatal Python error: Aborted" in launch.tail()
    assert "in aborted" in launch.tail()
    assert "others have the last word" in launch.tail()


def test_leaving_a_block_by_an_exception(ranks: Nursery, store: Path, tmp_path: Path) -> None:
    """A rank that is alone does not wait for ever; where all live, the last save is still made."""
    options = {"store": str(store)}
    with ranks.launch(f"{PROGRAMS}:left_alone", options, folder=tmp_path, name="alone") as alone:
        alone.done()
    assert one(alone, "left")["seconds"] < 60
    assert steps_or_none(store) == []

    with ranks.launch(f"{PROGRAMS}:together_out", options, folder=tmp_path, name="together") as together:
        together.done()
    assert one(together, "status")["errors"] == []
    assert steps(store) == [2]


def test_after_the_end_of_a_saver(ranks: Nursery, store: Path, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """A second saver at a time is refused, one after the other is not; training goes on as if there had been none."""
    options = {"store": str(store), "beside": str(tmp_path / "beside")}
    with ranks.launch(f"{PROGRAMS}:closed", options, folder=tmp_path, name="closed") as launch:
        launch.done()

    assert losses(launch) == undisturbed
    again = one(launch, "raised", name="attach again")
    assert (again["error"], again["message"]) == ("Conflict", "a saver for run 'run' is attached already")
    late = one(launch, "raised", name="save after close")
    assert (late["error"], late["message"]) == ("Conflict", "step 3 is not saved: the saver is closed")
    assert one(launch, "status")["saved"] == 2
    assert steps(store) == [2, 3]
    assert steps(store, "other") == [STEPS]
    assert steps(store, "half") == [STEPS, STEPS]  # of two attempts
    with Store(store) as opened:
        assert opened.show("end").step == STEPS
    assert (tmp_path / "beside" / "latest").exists()
    shard = next((tmp_path / "beside" / "global_step3").glob("*optim_states.pt"))
    assert shard.stat().st_size > 10_000  # its own content, and no pointer
    assert os.listdir(store / "parts") == []


def steps_or_none(store: Path) -> list[int]:
    """Return the visible steps of a store that may have no run yet."""
    with Store(store) as opened:
        assert opened.verify(read_data=True).damaged == ()
        return [entry.step for entry in opened.log()]


# -- commits that are collected ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Launch, Store]]:
    """Return what the ranks told, and the store that they left."""
    folder = tmp_path_factory.mktemp("collected")
    options = {"store": str(folder / "store"), "bucket": f"file://{folder}/bucket"}
    with layerstore.init(folder / "store") as store:
        with ranks.launch(f"{PROGRAMS}:collected", options, folder=folder, name="collected") as launch:
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


def test_a_run_is_pushed_while_it_trains(collected: tuple[Launch, Store]) -> None:
    """Once ``wait`` returns the remote has every save, and the store keeps what its rules say."""
    launch, store = collected
    url = f"file://{store.path.parent}/bucket"
    [told] = [event for event in launch.events("status") if event["name"] == PUSHED_RUN and event["rank"] == 0]
    assert (told["errors"], told["pushed_step"], told["collection_error"]) == ([], 4, "")
    assert [(entry.step, entry.pushed) for entry in store.log(PUSHED_RUN)] == [(4, (url,))]
    with layerstore.open(url) as remote:
        assert [entry.step for entry in remote.log()] == [4, 3, 2, 1]
        assert remote.verify(read_data=True).ok
