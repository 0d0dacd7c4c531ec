"""
Files that do not belong together: each is sound by itself, and the whole would resume as something nobody trained.

The store is compared before and after every refusal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerstore.errors import LayoutMismatch, SourceCheckpoint, Unsupported
from layerstore.ingest.execute import Ingested
from layerstore.store import Store, init
from layerstore.tree import OrderedMap, Size
from tests.faults.harness import copied, tiny_checkpoint
from tests.faults.test_bad_input import TAG, edit, ingest, refused, shards

HF = "hf/checkpoint-2"


@pytest.fixture(scope="module")
def sound(fast_module_path: Path) -> Path:
    """Return a folder with a store and sound checkpoints: of step 2 in two layouts, and of step 4."""
    tiny_checkpoint(fast_module_path / "raw")
    tiny_checkpoint(fast_module_path / HF, layout="hf")
    tiny_checkpoint(fast_module_path / "later", step=4)
    init(fast_module_path / "store").close()
    return fast_module_path


@pytest.fixture
def place(sound: Path, fast_path: Path) -> Path:
    """Return a copy of ``sound``."""
    return copied(sound, fast_path / "place")


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    """Return the store of ``place``."""
    with Store(place / "store") as opened:
        yield opened


def taken(store: Store, place: Path) -> Ingested:
    """Ingest the raw checkpoint of *place*; check that all of it came through."""
    ingested = store.ingest(place / "raw", run="run")
    store.compose("run@2").write(place / "out", durable=False)
    assert {path.name for path in shards(place)} == {path.name for path in (place / "out" / TAG).iterdir()}
    return ingested


def in_every(place: Path, what: str, change: Callable[[Any], object]) -> None:
    """Let *change* alter the tree of every rank's *what* file."""
    for path in shards(place, what):
        edit(path, change)


# -- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["model", "optim", ""])
def test_a_ranks_files_under_another_ranks_names_are_a_mismatch(place: Path, what: str) -> None:
    """Copied over those of another rank, they would give it a wrong slice of everything."""
    for path in shards(place, what):
        if "rank_1" in path.name:
            shutil.copy(path.with_name(path.name.replace("rank_1", "rank_0")), path)

    with refused(place, LayoutMismatch, naming="was saved as"):
        ingest(place)


@pytest.mark.fault(63)
@pytest.mark.parametrize("what", ["model", "optim"])
def test_swapped_ranks_are_a_mismatch(place: Path, what: str) -> None:
    """Nothing is missing and every length fits: only what each file was saved as tells."""
    first, second = shards(place, what)
    aside = first.rename(place / "aside")
    second.rename(first)
    aside.rename(second)

    with refused(place, LayoutMismatch, naming="was saved as"):
        ingest(place)


def test_a_prefix_on_one_rank_alone_is_a_mismatch(place: Path) -> None:
    """The engine gives all optimizer files of a save the same beginning."""
    path = shards(place, "optim")[1]
    path.rename(path.with_name(path.name.removeprefix("bf16_")))

    with refused(place, LayoutMismatch, naming="bf16_"):
        ingest(place)


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault(63)
def test_one_optimizer_of_another_step_is_a_mismatch(place: Path) -> None:
    """Its masters and moments are of another moment than those of the other ranks."""
    path = shards(place, "optim")[1]
    shutil.copy(place / "later" / "global_step4" / path.name, path)

    with refused(place, LayoutMismatch, naming="the optimizer's count of updates"):
        ingest(place)


def test_optimizers_that_all_counted_otherwise_are_noted(store: Store, place: Path) -> None:
    """An optimizer can be younger than its engine, so this is a doubt and no refusal."""
    for path in shards(place, "optim"):
        shutil.copy(place / "later" / "global_step4" / path.name, path)

    (note,) = taken(store, place).notes

    assert "the optimizer has counted 4 updates, the engine 2" in note


def test_a_sound_checkpoint_is_not_doubted(store: Store, place: Path) -> None:
    """Neither of the engine's steps nor of anything else is there a note."""
    assert taken(store, place).notes == ()


# -- what a rank holds ---------------------------------------------------------------------------------------------


def _shortened(groups: slice) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        states = tree["optimizer_state_dict"]["optimizer_state_dict"]["state"]
        for number in sorted(states)[groups]:
            moment = states[number]["exp_avg_sq"]
            states[number]["exp_avg_sq"] = replace(moment, shape=Size((moment.elements - 1,)))

    return change


@pytest.mark.fault(67)
@pytest.mark.known_fault("llmtailor 12")
@pytest.mark.parametrize("groups", [slice(1), slice(None)], ids=["one sub-group", "every sub-group"])
def test_a_moment_of_another_length_is_a_mismatch(place: Path, groups: slice) -> None:
    """Even on all ranks alike, it must not pass for a scalar and leave its layers."""
    in_every(place, "optim", _shortened(groups))

    with refused(place, LayoutMismatch, naming="exp_avg_sq"):
        ingest(place)


def test_a_parameter_in_two_sub_groups_is_a_mismatch(place: Path) -> None:
    """Two places of one name would overwrite each other, though every length fits."""

    def change(tree: Any) -> None:
        first, second = tree["param_shapes"]
        names = [next(iter(first)), *list(second)[1:]]
        tree["param_shapes"][1] = OrderedMap(dict(zip(names, second.values(), strict=True)))

    in_every(place, "model", change)

    with refused(place, LayoutMismatch, naming="two places"):
        ingest(place)


def _without_state(tree: Any) -> None:
    tree["optimizer_state_dict"]["optimizer_state_dict"]["state"].clear()


def _offloading(tree: Any) -> None:
    tree["ds_config"]["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}


def test_an_optimizer_that_keeps_no_state_is_taken(store: Store, place: Path) -> None:
    """Plain SGD has none after any number of steps."""
    in_every(place, "optim", _without_state)

    assert taken(store, place).is_new


def test_an_optimizer_whose_state_may_be_elsewhere_is_unsupported(place: Path) -> None:
    """With offloading, no state in the files means that it was never saved."""
    in_every(place, "optim", _without_state)
    in_every(place, "", _offloading)

    with refused(place, Unsupported, naming="never saved"):
        ingest(place)


# -- what a Trainer wrote beside them ------------------------------------------------------------------------------


@pytest.mark.known_fault("llmtailor 9")
def test_a_missing_random_state_makes_a_checkpoint_incomplete(place: Path) -> None:
    """Every rank writes its own: if one did, all did."""
    (place / HF / "rng_state_1.pth").unlink()

    with refused(place, SourceCheckpoint, naming="the random state of rank 1"):
        ingest(place, HF)


@pytest.mark.known_fault("llmtailor 9")
def test_a_missing_trainer_state_makes_a_checkpoint_unfinished(place: Path) -> None:
    """Where the Trainer's other files are, its own state is nearly the last: without it the step is not known."""
    (place / HF / "trainer_state.json").unlink()

    with refused(place, SourceCheckpoint, naming="no trainer_state.json"):
        ingest(place, HF)


@pytest.mark.known_fault("llmtailor 9")
def test_a_missing_shard_of_weights_makes_a_checkpoint_incomplete(place: Path) -> None:
    """The index of sharded weights names all of them."""
    index = {"metadata": {"total_size": 2}, "weight_map": {"a": "model.safetensors", "b": "absent.safetensors"}}
    (place / HF / "model.safetensors.index.json").write_text(json.dumps(index))

    with refused(place, SourceCheckpoint, naming="absent.safetensors"):
        ingest(place, HF)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(place: Path, index: str) -> None:
    """A cut or bent index is named, not believed."""
    (place / HF / "model.safetensors.index.json").write_text(index)

    with refused(place, SourceCheckpoint, naming="model.safetensors.index.json"):
        ingest(place, HF)


@pytest.mark.parametrize("offsets", [[0.0, 2.0], [0, 2.0], [False, 2], [-2, 0]], ids=str)
def test_weights_at_offsets_that_are_no_sizes_are_refused(place: Path, offsets: list[float]) -> None:
    """A number that merely compares equal to a size is no size."""
    header = json.dumps({"a": {"dtype": "BF16", "shape": [1], "data_offsets": offsets}}).encode()
    (place / HF / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")

    with refused(place, SourceCheckpoint, naming="no whole numbers"):
        ingest(place, HF)
