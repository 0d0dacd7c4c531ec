"""Checkpoints of FSDP are recognized by their names, whichever of their folders is named, and each hint works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore.distcp import open_folder
from layerstore.errors import LayerstoreError, SourceCheckpoint, Unsupported
from layerstore.zero3 import discover, distributed_at

TRAINERS, TITANS, FULL, EACH = "trainers", "titans", "full", "each"

FILES = {
    TRAINERS: ("pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "trainer_state.json"),
    TITANS: (".metadata", "__0_0.distcp"),
    FULL: ("pytorch_model_fsdp.bin", "optimizer.bin", "trainer_state.json"),
    EACH: ("pytorch_model_fsdp_0_rank0.bin", "optimizer_0_rank0.bin"),
}


def saved(path: Path, form: str) -> Path:
    """Make the names of a checkpoint of *form*."""
    for name in FILES[form]:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return the folder of a training, with saves of the Trainer."""
    for step in (500, 1000):
        saved(tmp_path / f"out/checkpoint-{step}", TRAINERS)
    return tmp_path / "out"


@pytest.mark.fault(150)
@pytest.mark.parametrize("form", [TRAINERS, TITANS, FULL])
def test_deepspeeds_reader_names_the_command_that_takes_it(tmp_path: Path, form: str) -> None:
    """No part of such a checkpoint is offered as DeepSpeed's tag, and its parent is not said to hold DeepSpeed's."""
    whole = saved(tmp_path / "out/checkpoint-500", form)

    for asked in (whole, whole.parent):
        with pytest.raises(SourceCheckpoint) as refused:
            discover(asked)
        assert f"layerstore ingest {whole}" in str(refused.value.hint)
        assert "tag" not in f"{refused.value} {refused.value.hint}"


@pytest.mark.fault(150)
@pytest.mark.parametrize("look", [discover, open_folder])
def test_the_parent_of_several_names_them_and_a_command(out: Path, look: Callable[[Path], object]) -> None:
    """And the newest as an example."""
    with pytest.raises(
        SourceCheckpoint, match="holds distributed checkpoints: checkpoint-500, checkpoint-1000"
    ) as refused:
        look(out)

    assert refused.value.hint == f"give one of them, or several: layerstore ingest {out / 'checkpoint-1000'}"


def test_a_tag_that_is_asked_for_changes_nothing(out: Path) -> None:
    """The halves are not tags."""
    with pytest.raises(SourceCheckpoint, match="and not of DeepSpeed"):
        discover(out / "checkpoint-500", tag="pytorch_model_fsdp_0")


@pytest.mark.fault(150)
@pytest.mark.parametrize("half", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_one_half_is_told_of_the_whole(out: Path, half: str) -> None:
    """The other one lies beside it."""
    whole = out / "checkpoint-500"

    with pytest.raises(SourceCheckpoint, match="is one half of the checkpoint") as refused:
        open_folder(whole / half)
    with pytest.raises(SourceCheckpoint) as without:
        discover(whole / half)

    assert refused.value.hint == f"name {whole}, which holds both"
    assert without.value.hint == f"layerstore ingest {whole}"


def test_folders_of_saves_that_lie_side_by_side_are_several(tmp_path: Path) -> None:
    """As torchtitan leaves them."""
    for step in (9, 10):
        saved(tmp_path / f"checkpoint/step-{step}", TITANS)

    with pytest.raises(SourceCheckpoint, match="holds distributed checkpoints: step-9, step-10"):
        discover(tmp_path / "checkpoint")


def test_a_file_for_each_rank_is_refused_with_the_form_that_is_read(tmp_path: Path) -> None:
    """Whichever way it is asked for."""
    whole = saved(tmp_path / "checkpoint-500", EACH)

    for look in (discover, open_folder):
        with pytest.raises(Unsupported, match="a file for each rank") as refused:
            look(whole)
        assert "SHARDED_STATE_DICT" in str(refused.value.hint)


@pytest.mark.fault(150)
@pytest.mark.parametrize("form", [TRAINERS, TITANS, FULL])
def test_all_names_the_command_for_others(tmp_path: Path, form: str) -> None:
    """A survey takes DeepSpeed's checkpoints alone, and says once for each other one how it is taken."""
    whole = saved(tmp_path / "out/checkpoint-500", form)

    with pytest.raises(LayerstoreError) as refused:
        layerstore.find_checkpoints(tmp_path)

    assert f"layerstore ingest {whole}" in str(refused.value.hint)


def test_each_is_noted_once(out: Path, tmp_path: Path) -> None:
    """And not its halves, too."""
    (tmp_path / "ds/global_step1").mkdir(parents=True)
    (tmp_path / "ds/global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt").touch()

    assert len(layerstore.find_checkpoints(tmp_path).notes) == 2


def test_a_checkpoint_of_deepspeed_is_told_to_leave_onto_out(tmp_path: Path) -> None:
    """And any other folder what --onto is for."""
    (tmp_path / "ds/global_step1").mkdir(parents=True)
    (tmp_path / "ds/global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    (tmp_path / "empty").mkdir()

    with pytest.raises(SourceCheckpoint) as deepspeeds:
        open_folder(tmp_path / "ds")
    with pytest.raises(SourceCheckpoint) as nothing:
        open_folder(tmp_path / "empty")

    assert "leave --onto out" in str(deepspeeds.value.hint)
    assert "leave --onto out" not in str(nothing.value.hint)


@pytest.mark.fault(150)
def test_models_of_several_steps_are_no_halves(tmp_path: Path) -> None:
    """Only a model's and an optimizer's folder that end alike are one checkpoint."""
    for name in ("model_200", "model_300"):
        saved(tmp_path / name, TITANS)

    assert distributed_at(tmp_path / "model_300") == tmp_path / "model_300"
    with pytest.raises(SourceCheckpoint, match="holds distributed checkpoints: model_200, model_300"):
        discover(tmp_path)
