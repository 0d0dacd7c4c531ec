"""The Trainer and Accelerate save to a store and go on from it: nothing of their training changes by one bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import layerstore
from layerstore.format import encode_blob
from layerstore.history import resolve
from layerstore.model import CommitRecord
from layerstore.states import RankState
from layerstore.store import Store
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, train

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

PROGRAM = "tests.live.hugging_face"
STEPS = [1, 2, 3, 4, 5, 6]
SAVED = [2, 4, 6]

each_gather = pytest.mark.parametrize("gather", [True, False], ids=["gathered", "not_gathered"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the uninterrupted jobs left, and those that were left in the middle."""
    out = tmp_path_factory.mktemp("trained")
    train(PROGRAM, ["--out", str(out), "--part", "train"], log=out / "train.log")
    return out


@pytest.fixture(scope="module")
def store_as_left(trained: Path) -> dict[str, list[int]]:
    """Return the steps of every run, before anything goes on with them."""
    with layerstore.open(trained / "store") as store:
        return {run: steps(store, run) for run in store.runs()}


@pytest.fixture(scope="module")
def resumed(trained: Path, store_as_left: dict[str, list[int]]) -> Path:
    """Return what another process made of the jobs that were left."""
    assert store_as_left
    train(PROGRAM, ["--out", str(trained), "--part", "resume"], log=trained / "resume.log")
    return trained


@pytest.fixture
def store(trained: Path) -> Iterator[Store]:
    """Return the store that all jobs saved to."""
    with layerstore.open(trained / "store") as opened:
        yield opened


@pytest.fixture(scope="module")
def ingested(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store of what the jobs without layerstore saved, each under the other's name."""
    with layerstore.init(tmp_path_factory.mktemp("ingested") / "store") as opened:
        for at, step in enumerate(SAVED):
            for gather in (True, False):
                opened.ingest(trained / f"files-{gather}" / f"checkpoint-{step}", run=f"stored-{gather}")
            opened.ingest(trained / "accelerate-files" / "checkpoints" / f"checkpoint_{at}", run="accelerate-stored")
        yield opened


def trace(out: Path, name: str) -> list[dict[str, Any]]:
    """Return what a job has written down of each step: exact losses, and of ZeRO gradient norms."""
    return [json.loads(line) for line in (out / name / "trace.jsonl").read_text().splitlines()]


def history(out: Path, name: str) -> list[dict[str, Any]]:
    """Return what a Trainer logged at each step: losses, learning rates, evaluations."""
    logged: list[dict[str, Any]] = json.loads((out / name / "history.json").read_text())
    return [entry for entry in logged if "train_loss" not in entry]  # that one is of this process alone


def weights(out: Path, name: str) -> dict[str, bytes]:
    """Return the bytes of each whole parameter at the end of a job."""
    found: dict[str, torch.Tensor] = torch.load(out / name / "weights.pt")
    return {key: value.contiguous().view(torch.uint8).numpy().tobytes() for key, value in found.items()}


def steps(store: Store, run: str) -> list[int]:
    """Return the steps of all commits of *run*, each as often as it was saved."""
    return sorted(row.step for row in store.repo.catalog.view(run).visible)


def record(store: Store, run: str, step: int) -> CommitRecord:
    """Return the only commit of *run* at *step*."""
    (row,) = (row for row in store.repo.catalog.view(run).visible if row.step == step)
    return store.repo.catalog.commit(row.name).record


def states(store: Store, commit: CommitRecord) -> list[RankState]:
    """Return the states of its ranks."""
    return [store.repo.state(ref) for ref in commit.states]


def files(state: RankState) -> dict[str, object]:
    """Return what is kept byte for byte beside one rank's state."""
    return {file.path: file for file in state.files}


def kept(store: Store, state: RankState, name: str) -> dict[str, Any]:
    """Return what torch loads of the file *name* beside one rank's state."""
    (content,) = (file.content for file in state.files if file.path == name)
    loaded: dict[str, Any] = torch.load(BytesIO(store.repo.content_of(content)), weights_only=False)
    return loaded


def trees(state: RankState) -> bytes:
    """Return the bytes of one rank's state without the files beside it."""
    return encode_blob(replace(state, files=(), gathered=()))


# -- the Trainer ---------------------------------------------------------------------------------------------------


@each_gather
def test_a_trainer_that_saves_to_the_store_trains_as_before(trained: Path, *, gather: bool) -> None:
    """Losses, norms, learning rates and evaluations are those of the same job without layerstore."""
    assert trace(trained, f"stored-{gather}") == trace(trained, f"files-{gather}")
    assert history(trained, f"stored-{gather}") == history(trained, f"files-{gather}")
    assert [entry["step"] for entry in trace(trained, f"stored-{gather}")] == STEPS


@each_gather
def test_the_best_state_is_loaded_from_the_store_at_the_end(trained: Path, *, gather: bool) -> None:
    """Every whole parameter is that of the best checkpoint, which is not the last one."""
    best = weights(trained, f"files-{gather}")

    assert weights(trained, f"stored-{gather}") == best
    state = json.loads((trained / f"stored-{gather}" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2


@each_gather
def test_what_rotation_removes_stays_in_the_store(
    trained: Path, store_as_left: dict[str, list[int]], *, gather: bool
) -> None:
    """The Trainer keeps one folder; each step is one commit, though without gathering it saves every step twice."""
    assert [path.name for path in (trained / f"stored-{gather}").glob("checkpoint-*")] == ["checkpoint-2"]
    assert store_as_left[f"stored-{gather}"] == SAVED


@each_gather
def test_commits_are_what_ingest_makes_of_the_trainers_own_folders(
    store: Store, ingested: Store, *, gather: bool
) -> None:
    """Layers and states are equal, and so are all files but the two that name their own folder; weights are left."""
    for step in SAVED:
        live, read = (record(of, f"stored-{gather}", step) for of in (store, ingested))
        assert [entry.version for entry in live.layers] == [entry.version for entry in read.layers]
        assert [entry.optimizer_step for entry in live.layers] == [entry.optimizer_step for entry in read.layers]
        assert live.layout == read.layout
        for mine, theirs in zip(states(store, live), states(ingested, read), strict=True):
            assert trees(mine) == trees(theirs)
            assert files(mine).keys() == files(theirs).keys()
            different = {name for name, file in files(mine).items() if file != files(theirs)[name]}
            assert different <= {"training_args.bin", "trainer_state.json"}
            assert mine.gathered == ()


def test_a_job_that_was_left_goes_on_from_its_folder(
    trained: Path, resumed: Path, store_as_left: dict[str, list[int]], store: Store
) -> None:
    """A new process with ``resume_from_checkpoint=True`` trains, evaluates and ends as if nothing had happened."""
    assert store_as_left["left"] == [2]
    assert trace(trained, "left") == trace(trained, "files-True")[:3]
    assert trace(resumed, "left-resumed") == trace(resumed, "files-True")[2:]
    assert history(resumed, "left-resumed") == history(resumed, "files-True")
    assert weights(resumed, "left-resumed") == weights(resumed, "files-True")
    assert trace(resumed, "left-bucket-resumed") == trace(resumed, "files-True")[2:]
    assert steps(store, "left") == SAVED
    assert {row.attempt for row in store.repo.catalog.view("left").visible} == {1}


def test_a_reference_resumes(resumed: Path) -> None:
    """No folder of the job is needed: the Trainer's own files come from the store, its random numbers too."""
    assert trace(resumed, "referenced") == trace(resumed, "files-True")[2:]
    assert history(resumed, "referenced") == history(resumed, "files-True")


def test_a_trainer_under_stage_2_goes_on_as_if_it_had_never_stopped(
    trained: Path, resumed: Path, store_as_left: dict[str, list[int]], store: Store
) -> None:
    """Under the same stage to the last bit; under stage 3 with the same losses."""
    assert store_as_left["left-stage2"] == [2]
    expected = trace(trained, "files-stage2")
    assert trace(trained, "left-stage2") == expected[:3]
    assert trace(resumed, "left-stage2-resumed") == expected[2:]
    assert weights(resumed, "left-stage2-resumed") == weights(trained, "files-stage2")
    assert [entry["losses"] for entry in trace(resumed, "to-stage3")] == [entry["losses"] for entry in expected[2:]]
    stages = {resolve(store.repo, f"{run}@4").record.stage for run in ("left-stage2", "to-stage3")}
    assert stages == {2, 3}


def test_the_checkpoint_of_a_signal_is_in_the_store(
    resumed: Path, store_as_left: dict[str, list[int]], store: Store
) -> None:
    """The step that SIGTERM has the Trainer save is whole, and training goes on from it."""
    assert store_as_left["terminated"] == [2, 3, 4]
    assert trace(resumed, "from-signal") == trace(resumed, "files-True")[3:]
    assert store.verify("terminated~1@3", read_data=True).ok


def test_a_signal_in_the_middle_of_a_step_saves_the_update_that_was_made(
    resumed: Path, store_as_left: dict[str, list[int]], store: Store
) -> None:
    """The Trainer calls it checkpoint-2, which was saved already; the state is that after step 3, and is not lost."""
    live, right = record(store, "terminated-in-step", 3), record(store, "every", 3)

    assert store_as_left["terminated-in-step"] == [2, 3]
    assert [entry.version for entry in live.layers] == [entry.version for entry in right.layers]
    # The Trainer takes the third batch once more; the commits go on counting updates.
    assert [entry["step"] for entry in trace(resumed, "terminated-in-step-resumed")] == STEPS[2:]
    assert steps(store, "terminated-in-step") == [2, 3, 5, 7]


def test_saves_between_the_trainers_own(trained: Path, store_as_left: dict[str, list[int]], store: Store) -> None:
    """With ``every`` each step is in the store, and where the Trainer saves as well it is one commit."""
    assert store_as_left["every"] == STEPS
    assert trace(trained, "every") == trace(trained, "files-True")
    kept = files(states(store, record(store, "every", 3))[0]).keys()
    assert {"trainer_state.json", "scheduler.pt", "rng_state_0.pth"} <= kept


def test_a_save_without_a_folder_resumes(resumed: Path) -> None:
    """What ``every`` saved has all that a Trainer needs."""
    assert trace(resumed, "from-every") == trace(resumed, "files-True")[3:]


# -- Accelerate ----------------------------------------------------------------------------------------------------


def test_accelerate_saves_to_the_store_and_trains_as_before(trained: Path, store_as_left: dict[str, list[int]]) -> None:
    """Losses and norms are those without layerstore; of three folders two are kept, and all three commits."""
    folders = sorted(path.name for path in (trained / "accelerate-stored" / "checkpoints").iterdir())

    assert trace(trained, "accelerate-stored") == trace(trained, "accelerate-files")
    assert folders == ["checkpoint_1", "checkpoint_2"]
    assert store_as_left["accelerate-stored"] == SAVED


def test_accelerates_commits_are_what_ingest_makes_of_its_folders(store: Store, ingested: Store) -> None:
    """Layers, states and files are equal; beside them lie the random numbers in the form that ``resume`` sets."""
    for step in SAVED:
        live, read = (record(of, "accelerate-stored", step) for of in (store, ingested))
        assert [entry.version for entry in live.layers] == [entry.version for entry in read.layers]
        assert live.layout == read.layout
        for rank, (mine, theirs) in enumerate(zip(states(store, live), states(ingested, read), strict=True)):
            assert trees(mine) == trees(theirs)
            own, name = files(mine), f"rng_state_{rank}.pth"
            assert torch.equal(
                kept(store, mine, name)["cpu"], kept(store, mine, f"random_states_{rank}.pkl")["torch_manual_seed"]
            )
            del own[name]
            assert own == files(theirs)


def test_accelerate_goes_on_from_its_folder(resumed: Path, store_as_left: dict[str, list[int]], store: Store) -> None:
    """
    ``load_state`` follows the pointers: scheduler, random numbers and all later losses are the same.

    The process had ended right after ``save_state``: its end alone made that save durable.
    """
    assert store_as_left["accelerate-left"] == [2]
    assert trace(resumed, "accelerate-left-resumed") == trace(resumed, "accelerate-files")[2:]
    assert steps(store, "accelerate-left") == SAVED
