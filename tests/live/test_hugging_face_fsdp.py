"""The Trainer and Accelerate save under FSDP2 to a store and go on from it: nothing changes by one bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import layerstore
from layerstore.arrays import TensorKind
from layerstore.composite import Composite
from layerstore.errors import InvalidInput
from layerstore.store import Store
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, train
from tests.live.test_hugging_face import SAVED, STEPS, history, steps, trace

pytestmark = [pytest.mark.timeout(3 * LAUNCH_SECONDS_MAX), pytest.mark.full]

PROGRAM = "tests.live.hugging_face_fsdp"
FORMS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]

each_form = pytest.mark.parametrize("form", FORMS, ids=["sharded", "full"])


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


@pytest.fixture(scope="module")
def elsewhere(trained: Path, store_as_left: dict[str, list[int]]) -> Path:
    """Return what three ranks made of a folder of two."""
    assert store_as_left
    train(PROGRAM, ["--out", str(trained), "--part", "elsewhere"], log=trained / "elsewhere.log", world_size=3)
    return trained


@pytest.fixture
def store(trained: Path) -> Iterator[Store]:
    """Return the store that all jobs saved to."""
    with layerstore.open(trained / "store") as opened:
        yield opened


def tensors(out: Path, name: str) -> dict[str, bytes]:
    """Return the bytes of each whole tensor that a job wrote down."""
    found: dict[str, torch.Tensor] = torch.load(out / name)
    return {key: value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, value in found.items()}


def held(composite: Composite, kind: TensorKind, state: str | None = None) -> dict[str, bytes]:
    """Return the bytes of all tensors of *kind* that the store holds."""
    return {name: value.tobytes() for name, value in composite.tensors(kind, state=state).items()}


# -- the Trainer ---------------------------------------------------------------------------------------------------


@each_form
def test_a_trainer_that_saves_to_the_store_trains_as_before(trained: Path, form: str) -> None:
    """Losses, norms, learning rates and evaluations are those of the same job without layerstore."""
    assert trace(trained, f"stored-{form}") == trace(trained, f"files-{form}")
    assert history(trained, f"stored-{form}") == history(trained, f"files-{form}")
    assert [entry["step"] for entry in trace(trained, f"stored-{form}")] == STEPS


@each_form
def test_a_folder_holds_pointers_and_the_trainers_own_files(trained: Path, form: str) -> None:
    """Nothing is in it of model and optimizer; in the full form the Trainer adds its export for Transformers."""
    folder = trained / f"left-{form}" / "checkpoint-2"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pointers = {"pytorch_model_fsdp.bin", "optimizer.bin", "pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata"}
    own = {"rng_state_0.pth", "rng_state_1.pth", "scheduler.pt", "trainer_state.json"}
    export = {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"}

    assert files == pointers | own | (export if form == "FULL_STATE_DICT" else set())
    assert all((folder / name).stat().st_size < 4096 for name in pointers)


@each_form
def test_the_best_weights_are_loaded_from_the_store_at_the_end(trained: Path, form: str) -> None:
    """Every parameter is that of the best checkpoint, which is not the last one; rotation has kept that folder."""
    assert tensors(trained, f"stored-{form}/ended.pt") == tensors(trained, f"files-{form}/ended.pt")
    assert [path.name for path in (trained / f"stored-{form}").glob("checkpoint-*")] == ["checkpoint-2"]


@each_form
def test_what_rotation_removes_stays_in_the_store(store: Store, store_as_left: dict[str, list[int]], form: str) -> None:
    """Each save is one commit, with the Trainer's own files of each rank."""
    assert store_as_left[f"stored-{form}"] == SAVED
    for step in SAVED:
        base = store.compose(f"stored-{form}@{step}").composition.base
        kept = [{file.path for file in store.repo.state(ref).files} for ref in base.states]
        assert {"trainer_state.json", "scheduler.pt", "rng_state_0.pth"} <= kept[0]
        assert kept[1] == {"rng_state_1.pth"}
        assert not any(name.endswith((".bin", ".metadata", ".safetensors")) for name in kept[0] - {"training_args.bin"})


def test_commits_hold_what_ingest_makes_of_the_trainers_own_folders(store: Store, trained: Path) -> None:
    """Masters, both moments and the step are equal, bit for bit."""
    with layerstore.init(trained / "ingested") as other:
        for form in FORMS:
            other.ingest(trained / f"files-{form}" / "checkpoint-4", run=form)
            live, read = store.compose(f"stored-{form}@4"), other.compose(f"{form}@4")
            assert held(live, "master") == held(read, "master")
            for state in ("exp_avg", "exp_avg_sq"):
                assert held(live, "optimizer", state) == held(read, "optimizer", state)


@each_form
def test_a_job_that_was_left_goes_on_from_its_folder(
    resumed: Path, store_as_left: dict[str, list[int]], store: Store, form: str
) -> None:
    """A new process with ``resume_from_checkpoint=True`` trains, evaluates and ends as if nothing had happened."""
    assert store_as_left[f"left-{form}"] == [2]
    assert trace(resumed, f"left-{form}") == trace(resumed, f"files-{form}")[:3]
    assert trace(resumed, f"resumed-{form}") == trace(resumed, f"files-{form}")[2:]
    assert history(resumed, f"resumed-{form}") == history(resumed, f"files-{form}")
    assert tensors(resumed, f"resumed-{form}/ended.pt") == tensors(resumed, f"files-{form}/ended.pt")
    assert steps(store, f"left-{form}") == SAVED
    assert {row.attempt for row in store.repo.catalog.view(f"left-{form}").visible} == {1}


def test_saves_between_the_trainers_own_resume(
    resumed: Path, store_as_left: dict[str, list[int]], store: Store
) -> None:
    """With ``every`` each step is in the store, and a reference to one resumes without any folder of the job."""
    assert store_as_left["every"] == STEPS
    assert trace(resumed, "every") == trace(resumed, f"files-{FORMS[0]}")
    assert trace(resumed, "referenced") == trace(resumed, f"files-{FORMS[0]}")[3:]
    assert steps(store, "referenced") == [4, 6]


def test_a_folder_of_one_form_resumes_in_the_other(resumed: Path) -> None:
    """What the Trainer is told of its own state dicts makes no difference to what is in the store."""
    assert trace(resumed, "other-form") == trace(resumed, f"files-{FORMS[0]}")[2:]


def test_a_trainer_goes_on_from_what_deepspeed_has_saved(resumed: Path, store: Store) -> None:
    """It begins with the masters and moments of ZeRO-3, bit for bit, and with its schedule; no folder lies between."""
    saved, begun = store.compose("zero@2"), tensors(resumed, "from-zero/begun.pt")

    for name, value in held(saved, "master").items():
        assert begun[name] == value
    for state in ("exp_avg", "exp_avg_sq"):
        assert {
            f"{name}.{state}": value for name, value in held(saved, "optimizer", state).items()
        }.items() <= begun.items()
    assert [entry["step"] for entry in trace(resumed, "from-zero")] == STEPS[2:]
    rates = [
        [entry["learning_rate"] for entry in history(resumed, name) if "learning_rate" in entry]
        for name in ("from-zero", f"files-{FORMS[0]}")
    ]
    assert rates[0] == rates[1]
    assert steps(store, "from-zero") == [4, 6]


def test_another_number_of_ranks_begins_with_the_same_state(resumed: Path, elsewhere: Path, store: Store) -> None:
    """Masters, moments and counts are equal bit for bit; the batches are others there, and so are the losses."""
    assert tensors(elsewhere, "elsewhere/begun.pt") == tensors(resumed, f"resumed-{FORMS[0]}/begun.pt")
    assert [(entry["step"], len(entry["losses"])) for entry in trace(elsewhere, "elsewhere")] == [
        (step, 3) for step in STEPS[2:]
    ]
    assert store.compose("elsewhere@6").world_size == 3


@each_form
def test_a_folder_says_what_it_is(trained: Path, store: Store, form: str) -> None:
    """Ingest refuses it, and so does whoever loads it without layerstore: with the command that writes it out."""
    folder = trained / f"left-{form}" / "checkpoint-2"
    words = f"layerstore compose left-{form}@2 -o FOLDER"

    with pytest.raises(InvalidInput, match="holds pointers") as refused:
        store.ingest(folder, run="again")
    assert words in str(refused.value.hint)
    with pytest.raises(RuntimeError, match=words):
        torch.load(folder / "optimizer.bin", weights_only=True)
    with pytest.raises(RuntimeError, match=words):
        FileSystemReader(folder / "pytorch_model_fsdp_0").read_metadata()


# -- Accelerate ----------------------------------------------------------------------------------------------------


def test_what_accelerate_has_prepared_is_saved_and_trains_as_before(
    trained: Path, store_as_left: dict[str, list[int]]
) -> None:
    """Its model and its wrapper of the optimizer are attached to as they are."""
    assert trace(trained, "accelerate-stored") == trace(trained, "accelerate-plain")
    assert store_as_left["accelerate-stored"] == SAVED


def test_accelerate_goes_on_from_the_store(resumed: Path, store_as_left: dict[str, list[int]], store: Store) -> None:
    """A new process that resumes has the same losses to the last bit, and goes on with the run."""
    assert store_as_left["accelerate-left"] == [2]
    assert trace(resumed, "accelerate-resumed") == trace(resumed, "accelerate-plain")[2:]
    assert steps(store, "accelerate-left") == SAVED
