"""Ranks die while they save: what was whole stays whole, what was torn is never seen, and the next launch goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import layerstore
from layerstore.store import Store
from tests.live.faulty import RUN, STEPS
from tests.live.forked import Event, Launch, Nursery

PROGRAMS = "tests.live.faulty"
LAYERS = 6


@pytest.fixture(scope="module")
def undisturbed(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the loss of every step of a training that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with ranks.launch(f"{PROGRAMS}:undisturbed", {}, folder=folder, name="undisturbed") as launch:
        return losses(launch.done())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a new store."""
    layerstore.init(tmp_path / "store").close()
    return tmp_path / "store"


def losses(launch: Launch, name: str = "") -> dict[int, str]:
    """Return the losses that *launch* told, by step."""
    return {event["step"]: event["loss"] for event in launch.events("loss") if event["name"] == name}


def due(launch: Launch, name: str = "") -> dict[int, list[str]]:
    """Return the layers that were due at each save of *launch*, on which all ranks agree."""
    found: dict[int, list[str]] = {}
    for event in launch.events("saved"):
        if event["name"] == name:
            assert found.setdefault(event["step"], event["due"]) == event["due"]
    return found


def one(launch: Launch, kind: str, **facts: object) -> Event:
    """Return the event of *kind* that the first rank told with *facts*."""
    wanted = {"rank": 0, **facts}
    (found,) = [event for event in launch.events(kind) if wanted.items() <= event.items()]
    return found


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


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_save_is_never_seen_and_the_next_launch_goes_on(
    point: str, ranks: Nursery, store: Path, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Earlier commits are whole, and the trajectory after the resume is the undisturbed one, bit for bit."""
    operation, part, stopped, newest = POINTS[point]
    options = {"store": str(store), "policy": "latest", "operation": operation, "part": part, "ranks": stopped}

    with ranks.launch(f"{PROGRAMS}:killed", options, folder=tmp_path, name="killed") as killed:
        killed.until("held", count=len(stopped))
        killed.kill()
        assert killed.statuses() == [-9, -9]

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


def test_one_rank_dies_alone(ranks: Nursery, store: Path, tmp_path: Path) -> None:
    """The other one cannot commit without it, nor waits for it for ever; what was due is due again."""
    options = {"store": str(store), "policy": "parity", "operation": "write", "part": "/tmp/", "ranks": (1,)}

    with ranks.launch(f"{PROGRAMS}:killed", options, folder=tmp_path, name="killed") as killed:
        killed.until("held")
        killed.kill(1)
        assert killed.statuses()[1] == -9

    assert steps(store) == [1, 2, 3]
    with ranks.launch(f"{PROGRAMS}:requeued", options, folder=tmp_path, name="requeued") as requeued:
        requeued.done()
    assert due(requeued)[4] == due(killed)[4]
    assert len(due(requeued)[4]) == LAYERS // 2
    assert steps(store) == list(range(1, STEPS + 1))
    with Store(store) as opened:
        found = {line.layer: line.step for line in opened.ls(f"{RUN}@4")}
    assert found == {layer: 4 if layer in due(killed)[4] else 3 for layer in found}
