"""A folder of torch.distributed.checkpoint becomes a commit by itself: its step, its slices, what lies beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import layerstore
from layerstore import Store
from layerstore.cli.app import main
from layerstore.distcp import standalone
from layerstore.errors import InvalidInput, LayerstoreError, SourceCheckpoint, Unsupported
from layerstore.format import records
from layerstore.model import DCP
from tests.live.dcp.states import State, Training, all_bits, read
from tests.unit.checkpoints import snapshot

# There is one process, and torch says so each time.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained(updates: int = 3) -> State:
    """Return a state after some updates."""
    return Training().train(updates).state()


def folder_of(tmp_path: Path, state: State) -> Path:
    """Return what ``dcp.save`` makes of *state*."""
    save(state, checkpoint_id=tmp_path / "run" / "checkpoint-9")
    return tmp_path / "run" / "checkpoint-9"


def test_ranks_are_not_asked_for(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of torch.distributed.checkpoint loads on any number of them."""
    store.ingest(folder_of(tmp_path, trained(5)), run="sft", step=5)
    words = ["--store", str(store.path), "compose", "sft@5", "--world-size", "4", "-o", str(tmp_path / "out")]

    assert main(words) == 2
    assert "which loads it on any number of ranks" in capsys.readouterr().err


# -- its step ----------------------------------------------------------------------------------------------------------


def test_the_trainers_own_file_says_the_step(store: Store, tmp_path: Path) -> None:
    """It counts what the user counts; and it is kept, as everything that lies beside the tensors."""
    folder = folder_of(tmp_path, trained())
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))

    assert store.ingest(folder).step == 7


@pytest.mark.parametrize(
    "more",
    [{"step": 8}, {"global_step": torch.tensor(8)}, {"train_state": {"step": torch.tensor(8, dtype=torch.int32)}}],
    ids=["step", "global_step", "torchtitan"],
)
def test_a_value_of_the_state_says_the_step(store: Store, tmp_path: Path, more: State) -> None:
    """Where trainers keep it."""
    assert store.ingest(folder_of(tmp_path, {**trained(), **more})).step == 8


def test_the_optimizers_counters_say_the_step(store: Store, tmp_path: Path) -> None:
    """If nothing else does."""
    assert store.ingest(folder_of(tmp_path, trained(5))).step == 5


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 2.5])
def test_a_value_that_is_no_whole_number_is_no_step(store: Store, tmp_path: Path, number: float) -> None:
    """The optimizer's counters say it then."""
    assert store.ingest(folder_of(tmp_path, {**trained(5), "step": torch.tensor(number)})).step == 5


def test_the_user_says_the_step(store: Store, tmp_path: Path) -> None:
    """Where nothing does; and if something does, it is the user who knows."""
    weights = {"model": trained()["model"]}

    assert store.ingest(folder_of(tmp_path / "one", weights), step=11, run="one").step == 11
    assert store.ingest(folder_of(tmp_path / "two", trained()), step=12, run="two").step == 12


def test_without_a_step_it_is_refused(store: Store, tmp_path: Path) -> None:
    """No number is made up."""
    folder, before = folder_of(tmp_path, {"model": trained()["model"]}), snapshot(store)

    with pytest.raises(InvalidInput, match="does not state its step") as refused:
        store.ingest(folder)

    assert "--step" in str(refused.value.hint)
    assert snapshot(store) == before


def test_several_go_in_the_order_of_their_numbers(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As DeepSpeed's do; one step is of one of them."""
    folders = [str(tmp_path / "run" / f"step-{step}") for step in (10, 9)]
    for folder, step in zip(folders, (10, 9), strict=True):
        save({**trained(), "step": step}, checkpoint_id=folder)
    words = ["--store", str(store.path), "ingest", *folders, "--run", "sft"]

    assert main([*words, "--step", "9"]) == 2
    assert "--step 9 is for one checkpoint" in capsys.readouterr().err
    assert main([*words, "--json"]) == 0
    commits = json.loads(capsys.readouterr().out)["commits"]
    assert [commit["step"] for commit in commits] == [9, 10]


# -- its slices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 1000])
def test_large_layers_are_cut(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Into as many slices as keep objects small, which is recorded; and the tensors are the same."""
    state = trained()
    folder = folder_of(tmp_path, state)
    monkeypatch.setattr(standalone, "SLICED_BYTES", size)

    store.ingest(folder, run="cut")
    composite = store.compose("cut")

    assert composite.world_size > 1
    assert all_bits(read(store, "cut", state)) == all_bits(state)


def test_small_ones_are_not(store: Store, tmp_path: Path) -> None:
    """One object of each kind."""
    store.ingest(folder_of(tmp_path, trained()), run="whole")

    assert store.compose("whole").world_size == 1


def test_a_full_state_dict_has_every_parameter_once(store: Store, tmp_path: Path) -> None:
    """In the Trainer's default form tensors lie in one file; those of one storage are tied, and no others."""
    first, second = torch.arange(6.0), torch.arange(4.0)
    torch.save({"a.weight": first, "b.weight": second, "c.weight": first}, tmp_path / "pytorch_model_fsdp.bin")
    moments = {name: {"exp_avg": torch.ones(of)} for name, of in (("a.weight", 6), ("b.weight", 4))}
    torch.save({"state": moments, "param_groups": []}, tmp_path / "optimizer.bin")

    store.ingest(tmp_path, run="full", step=1)

    saved = store.compose("full")
    assert {name: of.tolist() for name, of in saved.tensors("master").items()} == {
        "a.weight": first.tolist(),
        "b.weight": second.tolist(),
    }
    assert set(saved.tensors("optimizer", state="exp_avg")) == {"a.weight", "b.weight"}


def test_what_comes_back_is_the_same_commit(store: Store, tmp_path: Path) -> None:
    """Ingested, exported and ingested again, it is found to be there."""
    first = store.ingest(folder_of(tmp_path, trained()), run="sft")

    out = store.compose("sft").export(tmp_path / "out", format="dcp").out
    again = store.ingest(out, run="again")

    assert again.step == first.step
    versions = [{name: of.version for name, of in store.compose(ref).layers.items()} for ref in ("sft", "again")]
    assert versions[0] == versions[1]


def test_parts_of_a_history_are_inherited(store: Store, tmp_path: Path) -> None:
    """What has not changed is not stored again."""
    training = Training()
    for step in (1, 2):
        folder = folder_of(tmp_path / str(step), training.train().state())
        store.ingest(folder, run="sft", policy="parity")

    first, second = sorted(store.log("sft"), key=lambda entry: entry.step)
    assert 0 < second.layers_saved < first.layers_saved


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_reader_that_does_not_know_the_flag_needs_a_newer_layerstore(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the state for one of DeepSpeed."""
    store.ingest(folder_of(tmp_path, trained()), run="sft")
    monkeypatch.setattr(records, "KNOWN_FLAGS", records.KNOWN_FLAGS - {DCP})

    with layerstore.open(store.path) as older, pytest.raises(Unsupported, match="uses dcp, which"):
        older.compose("sft")


class Custom:
    """A class that nobody knows."""


def test_a_value_of_an_unknown_class_is_refused(store: Store, tmp_path: Path) -> None:
    """Nothing of it is run."""
    folder, before = folder_of(tmp_path, {**trained(), "mine": Custom()}), snapshot(store)

    with pytest.raises(SourceCheckpoint, match=r"unknown globals: .*Custom"):
        store.ingest(folder)

    assert snapshot(store) == before


def without_a_file(folder: Path) -> None:
    """Remove tensors."""
    next(folder.glob("*.distcp")).unlink()


def flipped(folder: Path) -> None:
    """Change a tensor."""
    path = next(folder.glob("*.distcp"))
    data = bytearray(path.read_bytes())
    at = data.index(b"data/0") + 200
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [without_a_file, flipped])
def test_a_damaged_folder_is_refused(store: Store, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    """Nothing of it is stored as if it was whole."""
    folder = folder_of(tmp_path, trained())
    damage(folder)

    with pytest.raises(LayerstoreError):
        store.ingest(folder)

    assert not list(store.log())
