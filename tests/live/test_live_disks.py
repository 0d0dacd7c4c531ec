"""Bad disks while real ranks train: training goes on as if nothing were saved, and the next save makes up for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import layerstore
from layerstore.store import Store
from tests.faults.disks import is_remounted, mounted
from tests.forked import Nursery
from tests.live.launched import due, losses, one
from tests.live.tiny import STEPS

PROGRAMS = "tests.live.faulty_disks"
DISK_BYTES = 48 << 20
LAYERS = 6
HOOKS = ("on_saved", "on_failed")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a small disk of its own."""
    with mounted("tmpfs", tmp_path / "disk", DISK_BYTES) as place:
        yield place


@pytest.mark.fault(16)
def test_a_disk_fills_up(ranks: Nursery, disk: Path, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """The saves that find it full are given up, whole; the first one after that has all that was due meanwhile."""
    layerstore.init(disk / "store").close()
    options = {"store": str(disk / "store"), "ballast": str(disk / "ballast")}

    with ranks.launch(f"{PROGRAMS}:filled_up", options, folder=tmp_path, name="full") as launch:
        launch.done()

    with Store(disk / "store") as store:
        assert store.verify(read_data=True).damaged == ()
        for name in ("almost", "full", "sync"):
            assert losses(launch, name) == undisturbed
            found = one(launch, "status", name=name)
            assert found["failed"] == 2
            assert all("No space left" in error or "could not write its share" in error for error in found["errors"])
            assert [entry.step for entry in store.log(name)] == [6, 5, 2, 1]
            saved = due(launch, name)
            assert len(saved[2]) == LAYERS // 2
            assert len(saved[5]) == LAYERS  # both halves were given up
            assert len(saved[6]) == LAYERS // 2
            origins = {line.layer: line.step for line in store.ls(f"{name}@6")}
            assert origins == {layer: 6 if layer in saved[6] else 5 for layer in origins}
        raised = [event for event in launch.events("raised") if event["name"] == "sync"]
        assert sorted((event["rank"], event["error"]) for event in raised) == [
            (rank, "StorageIO") for rank in (0, 0, 1, 1)
        ]
    assert "training continues" in launch.log.read_text()
    assert os.listdir(disk / "store" / "parts") == []


def test_things_break_while_training(ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """One rank's disk, part or objects, the folder of records, the whole store: only the save at that time is lost."""
    layerstore.init(tmp_path / "store").close()

    with ranks.launch(
        f"{PROGRAMS}:broken", {"store": str(tmp_path / "store")}, folder=tmp_path, name="broken"
    ) as launch:
        launch.done()

    expected = {step: loss for step, loss in undisturbed.items() if step <= 3}
    with Store(tmp_path / "store") as store:
        assert store.verify(read_data=True).damaged == ()
        assert store.runs() == [
            "one-ranks-disk",
            "one-ranks-objects",
            "one-ranks-part",
            "record-folder",
            "store-gone",
        ]
        for run in store.runs():
            assert [entry.step for entry in store.log(run)] == [3, 1]
    for name in ("one rank's disk", "one rank's part", "one rank's objects", "record folder", "store gone"):
        assert losses(launch, name) == expected
        (error,) = one(launch, "status", name=name)["errors"]
        assert error.startswith("step 2: ")
        # Whoever looks first says so: the rank that wrote them, or the one that commits what all have written.
        told = any(words in error for words in ("were removed while", "had written, is gone"))
        assert name != "one rank's objects" or told, error
        # Each save that became a commit is for on_saved, on rank 0, each other one for on_failed.
        hooked = {kind: [each for each in launch.events(kind) if each["name"] == name] for kind in HOOKS}
        assert [(each["rank"], each["step"], bool(each["commit"])) for each in hooked["on_saved"]] == [
            (0, 1, True),
            (0, 3, True),
        ]
        [failed] = hooked["on_failed"]
        assert (failed["rank"], failed["step"], failed["commit"]) == (0, 2, "")
        assert f"step 2: {failed['failure']}" == error
    assert os.listdir(tmp_path / "store" / "parts") == []


@pytest.mark.fault(144)
def test_one_slow_disk_does_not_end_training(ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """
    All ranks wait for it together, for a while.

    After that they leave the save out together, or it is given up, and nobody waits for a rank until the group breaks.
    """
    layerstore.init(tmp_path / "store").close()

    with ranks.launch(
        f"{PROGRAMS}:stuck_on_one", {"store": str(tmp_path / "store")}, folder=tmp_path, name="stuck"
    ) as launch:
        launch.done()

    assert losses(launch, "piled") == undisturbed
    skipped = [(event["rank"], event["step"]) for event in launch.events("saved") if event["skipped"]]
    assert sorted(skipped) == [(0, 4), (1, 4)]
    log = launch.log.read_text()
    assert log.count("step 4 is not saved: earlier saves still wait for the disk") == 1
    with Store(tmp_path / "store") as store:
        assert store.verify(read_data=True).damaged == ()
        assert [entry.step for entry in store.log("piled")] == [STEPS, 3, 2, 1]
        assert {line.step for line in store.ls(f"piled@{STEPS}")} == {STEPS}  # what was due at step 4, too
        assert [entry.step for entry in store.log("slow")] == [4, 1]
        assert [entry.step for entry in store.log("dead")] == [4]
    assert losses(launch, "slow").keys() == losses(launch, "dead").keys() == {1, 2, 3, 4}
    errors = {(event["name"], event["rank"]): event["errors"] for event in launch.events("status")}
    assert errors["slow", 0] == errors["slow", 1] == errors["piled", 0] == errors["piled", 1] == []
    assert "the disk accepted no data for 1 s" in errors["dead", 1][0]
    assert "could not write its share" in errors["dead", 0][0]


@pytest.mark.fault(147, 148)
def test_a_first_launch_makes_the_store_and_says_so(
    ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Three lines serve the first launch and all later ones; what may be mistyped is said in one line of rank 0."""
    store = tmp_path / "runs" / "store"

    with ranks.launch(f"{PROGRAMS}:first_launch", {"store": str(store)}, folder=tmp_path, name="first") as launch:
        launch.done()

    assert losses(launch) == {step: loss for step, loss in undisturbed.items() if step <= 4}
    raised = {(event["name"], event["rank"]): event for event in launch.events("raised")}
    errors = {name: event["error"] for (name, _), event in raised.items()}
    assert errors == {
        "must exist": "NoStore",
        "create=False": "NoStore",
        "run": "InvalidInput",
        "URL": "InvalidInput",
        "no such run": "NotFound",
    }
    assert raised["must exist", 0]["message"] == raised["must exist", 1]["message"] == f"there is no store at {store}"
    seen = [{name: event.get(name) for name in ("there", "resumed", "folder")} for event in launch.events("seen")]
    nothing = {"resumed": None, "folder": None}
    assert seen == 2 * [{"there": False} | nothing] + 4 * [{"there": None} | nothing]

    said = [line.removeprefix("layerstore: ") for line in launch.log.read_text().splitlines() if "layerstore: " in line]
    mistyped = "run 'rnu' has no commit yet: training starts from scratch; did you mean run? runs here: run"
    other = "run 'new' has no commit yet: training starts from scratch; runs here: run"
    refusal = "; resume(…, must_exist=True) raises instead"
    assert said == [
        *2 * [f"there is no store at {store} yet: training starts from scratch"],
        f"made a new store: {store}",
        f"saving to {store}: run 'run' begins",
        mistyped + refusal,
        mistyped,
        other + refusal,
        other,
        f"loaded run@2 from {store}",
        f"saving to {store}, newest run@2",
        f"saving to {store}: run 'run' has commits up to step 4, and this engine was not resumed from them: starting "
        "attempt 2 from scratch, unless a load comes before the first save; layerstore.resume(engine, store, run='run')"
        " continues them",
    ]


@pytest.mark.fault(27)
def test_what_cannot_be_attached_to_is_refused_on_every_rank(
    ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """Each error is one line, raised at once, and training can continue without a saver."""
    store, other, copy = tmp_path / "store", tmp_path / "other", tmp_path / "copy"
    for path in (store, other):
        layerstore.init(path).close()
    shutil.copytree(store, copy)
    with ExitStack() as stack:
        pairs = {"other": (store, other), "copy": (store, copy), "none": (store, tmp_path / "nothing")}
        if os.getuid() == 0:
            place = stack.enter_context(mounted("tmpfs", tmp_path / "disk"))
            layerstore.init(place / "store").close()
            assert is_remounted(place, "ro")
            pairs["read-only"] = (place / "store", place / "store")
        options = {"stores": {name: tuple(map(str, paths)) for name, paths in pairs.items()}}
        with ranks.launch(f"{PROGRAMS}:refused", options, folder=tmp_path, name="refused") as launch:
            launch.done()

    assert losses(launch) == undisturbed
    raised = {(event["name"], event["rank"]): event for event in launch.events("raised")}
    words = {
        "other": "the ranks have different stores: rank 0 has",
        "copy": f"{copy} is not the store that rank 0 sees at this path",
        "none": f"there is no store at {tmp_path / 'nothing'}",
        "read-only": "Read-only file system",
    }
    for name in pairs:
        for rank in (0, 1):
            message = raised[name, rank]["message"]
            assert words[name] in message, message
            assert "\n" not in message
    assert raised["none, resume", 0]["message"] == f"rank 1: {raised['none, resume', 1]['message']}"
