"""Every way to load a folder through DeepSpeed does with pointers what it does with shards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import layerstore
from layerstore.store import Store
from tests.deepspeed.compare import checkpoint_differences, full_tensors, load, tree_differences
from tests.deepspeed.scenarios import SCENARIO_OF
from tests.forked import Launch, Nursery
from tests.live.cases import LOADED, WAYS
from tests.live.launched import due, losses, one

LAYERS = 6

each_scenario = pytest.mark.parametrize("scenario", LOADED)
each_way = pytest.mark.parametrize("way", WAYS)


def launched(ranks: Nursery, folder: Path, program: str) -> Launch:
    """Return what the ranks of *program* have told, whose store lies in *folder*."""
    layerstore.init(folder / "store").close()
    options = {"store": str(folder / "store"), "out": str(folder)}
    with ranks.launch(f"tests.live.loads:{program}", options, folder=folder, name=program) as launch:
        launch.done()
    return launch


@pytest.fixture(scope="module")
def loaded(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return what loads in all ways have made of engines: each by shards, and by pointers."""
    return launched(ranks, tmp_path_factory.mktemp("loaded"), "ways")


@pytest.fixture(scope="module")
def attempts(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Return what was told by a training that goes back in several ways."""
    return launched(ranks, tmp_path_factory.mktemp("attempts"), "anew")


@each_scenario
@each_way
def test_pointers_load_as_shards_do(loaded: Launch, scenario: str, way: str) -> None:
    """Masters, moments, buffers, schedule, counters; what is returned; and the next step of training."""
    root = loaded.log.parent / scenario
    shards, pointers = (root / f"from_{folder}" / way for folder in ("shards", "pointers"))

    assert (shards / "latest").read_text() == (pointers / "latest").read_text()
    tag = (shards / "latest").read_text()
    assert not checkpoint_differences(shards / tag, pointers / tag)
    for rank in (0, 1):
        expected, actual = (load(folder / f"returned_{rank}.pt") for folder in (shards, pointers))
        assert not tree_differences(expected, actual)


@pytest.mark.parametrize("scenario", [name for name in LOADED if SCENARIO_OF[name].stage == 3])
def test_what_deepspeed_loads_by_load_module_only(loaded: Launch, scenario: str) -> None:
    """No trained weight; the masters become those that the weights in the engine round to. We say so."""
    root = loaded.log.parent / scenario
    before = full_tensors(root / "shards" / "global_step1")
    after = full_tensors(root / "from_pointers" / "module" / "global_step1")

    assert before.keys() == after.keys()
    for name, tensors in before.items():
        master = tensors["master"]
        assert torch.equal(after[name]["master"], master.to(torch.bfloat16).to(master.dtype)), name
    text = loaded.log.read_text()
    assert text.count(f"{scenario}@2: under ZeRO stage 3 DeepSpeed's load_module_only=True loads buffers") == 1
    assert text.count(f"weights are from {scenario}@2, everything else is from {scenario}@1") == 1


def test_stages_1_and_2_load_the_weights_of_the_module(loaded: Launch) -> None:
    """Nothing has to be told."""
    assert not re.findall(r"stage\d_\w+@2: under ZeRO stage 3", loaded.log.read_text())


def test_a_load_of_weights_alone_begins_an_attempt(attempts: Launch) -> None:
    """The moments are not commit's: every layer is saved first. A load of everything goes on from its commit."""
    assert len(due(attempts, "weights")[2]) == LAYERS
    assert len(due(attempts)[2]) < LAYERS
    assert len(due(attempts, "all")[2]) < LAYERS
    with Store(attempts.log.parent / "store") as store:
        found = sorted((entry.attempt, entry.step) for entry in store.log("anew"))
    assert found == [(1, 1), (1, 2), (2, 2), (3, 2), (4, 2), (5, 1), (5, 2), (6, 3)]


def test_nothing_is_saved_after_a_load_that_failed_half_way(attempts: Launch) -> None:
    """The engine holds parts of two states, until it is loaded once more."""
    told = {event["name"]: event for event in attempts.events("hinted") if event["rank"] == 0}

    assert told.keys() == {"cut", "held back", "closed and attached again"}
    assert "the last load failed half-way" in told["closed and attached again"]["message"]
    assert "the last load failed half-way" in told["held back"]["message"]
    assert {event["rank"] for event in attempts.events("worked") if event["name"] == "whole again"} == {0, 1}


def test_an_attempt_that_begins_anew_is_told_of_before_its_first_save(attempts: Launch) -> None:
    """When a saver is attached and nothing was loaded, and after a load that it cannot continue from."""
    told = re.findall(
        r"run 'anew' has commits up to step (\d), .* not resumed.*: starting attempt (\d) from scratch",
        attempts.log.read_text(),
    )

    assert told == [("2", attempt) for attempt in "2456"]


def test_a_load_waits_for_the_savers_of_its_own_job(ranks: Nursery, tmp_path: Path) -> None:
    """Another engine loads or resumes at once from what was just saved, and trains on as the one that saved it."""
    launch = launched(ranks, tmp_path, "at_once")

    worked = {(event["name"], event["rank"]) for event in launch.events("worked")}
    assert worked == {(name, rank) for name in ("load", "resume", "stuck no more") for rank in (0, 1)}
    assert losses(launch, "one")[3] == losses(launch, "other")[3]
    assert losses(launch, "one")[4] == losses(launch, "third")[4]
    stuck = {event["rank"]: event for event in launch.events("hinted") if event["name"] == "stuck"}
    assert {event["error"] for event in stuck.values()} == {"Locked"}
    assert "step 4 of run 'one' is still being saved after 0 s" in stuck[0]["message"]
    assert stuck[1]["message"] == f"rank 0: {stuck[0]['message']}"
    lost = one(launch, "hinted", name="lost")
    assert lost["error"] == "NotFound"
    assert "a job is still saving attempt 1: the pointer's save is incomplete or failed" in lost["hint"]


def test_readers_without_layerstore_get_the_command(ranks: Nursery, tmp_path: Path) -> None:
    """DeepSpeed's own readers, its script in the folder, engines without a saver, universal ones."""
    launch = launched(ranks, tmp_path, "foreign")

    command = f"layerstore compose foreign@1 -o FOLDER --store {tmp_path / 'store'}"
    told = {event["name"]: event for event in launch.events("hinted") if event["rank"] == 0}
    assert told.keys() == {"no saver", "no saver, weights", "get_fp32", "script", "universal"}
    universal = told.pop("universal")
    assert universal["error"] == "Unsupported"
    assert universal["hint"] == f"{command}; then convert FOLDER with DeepSpeed's ds_to_universal.py"
    for name, event in told.items():
        assert "_model_states.pt is a pointer: the state is in the layerstore" in event["message"], name
        assert command in event["message"], name


def test_ranks_that_load_in_turn_do_not_wait_for_each_other(ranks: Nursery, tmp_path: Path) -> None:
    """Under `pipeline_loading_checkpoint` a rank begins behind the one before it: savers hear of it at the end."""
    launch = launched(ranks, tmp_path, "in_turn")

    assert {event["rank"] for event in launch.events("worked")} == {0, 1}
