"""Promises of ``find_checkpoints``: every ZeRO-3 checkpoint below a folder, once, in the order of training."""

import json
import shutil
from pathlib import Path

import pytest

import layerstore
from layerstore.errors import SourceCheckpoint
from tests.bench.generate import Layout
from tests.generated import generate
from tests.unit.checkpoints import SMALL, checkpoint


def found(*folders: Path) -> list[tuple[str, int | None]]:
    """Return each checkpoint's folder and tag below the first folder's parent, with its step."""
    top = folders[0].parent
    survey = layerstore.find_checkpoints(*folders)
    return [(tag.path.relative_to(top).as_posix(), tag.step) for tag in survey.found]


def test_all_tags_of_a_raw_folder_come_in_step_order(tmp_path: Path) -> None:
    """A shell, and a listing, would put global_step10 first."""
    for step in (10, 9, 100):
        generate(tmp_path / "sft", step=step, **SMALL)

    assert found(tmp_path / "sft") == [(f"sft/global_step{step}", step) for step in (9, 10, 100)]


@pytest.mark.parametrize("layout", ["hf", "accelerate"])
def test_all_checkpoints_of_a_trainer_come_in_step_order(tmp_path: Path, layout: Layout) -> None:
    """By the step that they say themselves: Accelerate counts its folders otherwise."""
    for number, step in ((0, 30), (1, 20), (10, 10)):
        generate(tmp_path / "out" / f"checkpoint-{number}", step=step, layout=layout, **SMALL)

    survey = layerstore.find_checkpoints(tmp_path)

    assert [tag.folder.name for tag in survey.found] == ["checkpoint-10", "checkpoint-1", "checkpoint-0"]
    assert [tag.step for tag in survey.found] == [10, 20, 30]


@pytest.mark.known_fault("llmtailor 16")
def test_the_trainers_step_wins_over_the_engines(tmp_path: Path) -> None:
    """As for ingest: the engine's counter may have started elsewhere."""
    folder = checkpoint(tmp_path, layout="hf")
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": 77}))

    assert [tag.step for tag in layerstore.find_checkpoints(tmp_path).found] == [77]


def test_folders_inside_each_other_are_found_once(tmp_path: Path) -> None:
    """A folder, a checkpoint inside it, its tag: all the same one."""
    folder = checkpoint(tmp_path)

    assert len(layerstore.find_checkpoints(tmp_path, folder, folder / "global_step2", tmp_path / ".").found) == 1


def test_what_is_not_whole_is_listed_too(tmp_path: Path) -> None:
    """Ingest shall say what is wrong with it; its place in the order comes from its name."""
    for step in (2, 4, 6):
        generate(tmp_path / "sft", step=step, **SMALL)
    (tmp_path / "sft" / "global_step4" / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"cut short")

    assert found(tmp_path / "sft") == [
        ("sft/global_step2", 2),
        ("sft/global_step4", None),
        ("sft/global_step6", 6),
    ]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """Neither in circles, nor out of the folder, nor to a shard."""
    folder = checkpoint(tmp_path / "out")
    elsewhere = checkpoint(tmp_path / "elsewhere", step=4)
    (tmp_path / "out" / "circle").symlink_to(tmp_path / "out")
    (tmp_path / "out" / "linked").symlink_to(elsewhere)
    shard = folder / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    shutil.move(shard, tmp_path / "shard")
    shard.symlink_to(tmp_path / "shard")

    assert found(tmp_path / "out") == [("out/sft/checkpoint-2/global_step2", None)]


def test_what_is_no_checkpoint_of_ours_to_take_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Other kinds, stores, and what a compose has not finished."""
    checkpoint(tmp_path)
    shutil.copytree(checkpoint(tmp_path, step=4), tmp_path / "resume.partial-0123abcd")
    (tmp_path / "other" / "global_step1").mkdir(parents=True)
    (tmp_path / "other" / "global_step1" / "layer_01-model_00-model_states.pt").touch()
    layerstore.init(tmp_path / "store").close()

    survey = layerstore.find_checkpoints(tmp_path)

    assert [tag.step for tag in survey.found] == [2, 4]
    assert sorted(note.split(": ")[1] for note in survey.notes) == [
        "a compose is writing it, or left it unfinished",
        "it is a store",
        "it looks like a pipeline-parallel checkpoint",
    ]


def test_a_folder_that_is_called_like_a_checkpoints_part_hides_nothing(tmp_path: Path) -> None:
    """``zero`` is the name of a part of universal checkpoints, and of somebody's experiment."""
    checkpoint(tmp_path / "experiments" / "zero")

    assert [tag.step for tag in layerstore.find_checkpoints(tmp_path).found] == [2]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.touch(), lambda path: None])
def test_nothing_to_find_is_an_error(tmp_path: Path, make: object) -> None:
    """An empty folder, a file, nothing at all: the path is named."""
    assert callable(make)
    make(tmp_path / "runs")

    with pytest.raises(SourceCheckpoint, match="runs"):
        layerstore.find_checkpoints(tmp_path / "runs")
