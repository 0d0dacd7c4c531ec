"""What real trainers saved comes out as Transformers loads it: the trainer's own weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from layerstore import Store
from layerstore.arrays import TensorKind
from layerstore.dtypes import DTypeName
from tests.compose.test_hf import mixed, weights_in
from tests.deepspeed.compare import differing, rank_trees, whole_weights
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, printed
from tests.deepspeed.scenarios import (
    HUGGING_FACE_SCENARIO_OF,
    HUGGING_FACE_SCENARIOS,
    RESUME_STEP,
    SAVE_STEPS,
    SCENARIOS,
    Scenario,
)

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

TRAINERS = [scenario.name for scenario in HUGGING_FACE_SCENARIOS if scenario.library == "trainer"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Tensors = dict[str, torch.Tensor]

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


def trained_weights(scenario: Scenario, root: Path, *, step: int = RESUME_STEP) -> Tensors:
    """Return what an export of *scenario* has to hold, in fp32 where it was trained; buffers as rank 0 has them."""
    folder = scenario.tag_dir(root, step=step)
    model = rank_trees(folder, 0)["model_states"]
    weights = {name: tensor.detach() for name, tensor in whole_weights(folder).items()}
    return weights | {name: model["module"][name].detach() for name in model["buffer_names"]}


def buffer_names(scenario: Scenario, root: Path) -> set[str]:
    """Return the names of the persistent buffers."""
    return set(rank_trees(scenario.tag_dir(root, step=RESUME_STEP), 0)["model_states"]["buffer_names"])


# -- raw folders of DeepSpeed --------------------------------------------------------------------------------------


TRAINED_IN = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "autocast": "fp32"}
"""By a scenario's precision: the type of an export that asks for none."""


@pytest.mark.parametrize("dtype", [None, *DTYPES])
@each_scenario
def test_every_scenario_is_exported_as_torch_casts_it(
    scenario: Scenario, dtype: DTypeName | None, stored: Store, trained: Launch, tmp_path: Path
) -> None:
    """Tied, frozen, odd, empty, in any precision: each parameter once, buffers as they are; the config is missed."""
    written = dtype or TRAINED_IN[scenario.precision]
    masters, buffers = trained_weights(scenario, trained.root), buffer_names(scenario, trained.root)
    expected = {name: tensor if name in buffers else tensor.to(DTYPES[written]) for name, tensor in masters.items()}

    exported = stored.compose(f"{scenario.name}@{RESUME_STEP}").export(tmp_path / "out", dtype=dtype)

    notes = " ".join(exported.notes)
    assert not differing(expected, weights_in(exported.out))
    assert exported.dtype == written
    assert "no config.json" in notes
    assert ("without its frozen parameters" in notes) == scenario.exclude_frozen
    assert ("buffers that differ by rank" in notes) == (scenario.name == "rank_buffers")


# -- the Trainer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", SAVE_STEPS)
@pytest.mark.parametrize("name", TRAINERS)
def test_an_export_equals_what_the_trainer_gathered(
    name: str, step: int, stored_hugging_face: Store, trained_hugging_face: Launch, tmp_path: Path
) -> None:
    """Tensor for tensor in the same shards, with the same index and small files, and nothing of the training."""
    scenario = HUGGING_FACE_SCENARIO_OF[name]
    source = scenario.checkpoint(trained_hugging_face.root, step=step)

    out = (
        stored_hugging_face.compose(f"{name}@{step}")
        .export(tmp_path / "out", max_shard_size=scenario.max_shard_size)
        .out
    )

    files = {path.name for path in source.glob("*.safetensors")}
    assert files == {path.name for path in out.glob("*.safetensors")}
    for file in files:
        expected = load_file(source / file)
        if scenario.stage != 3 and scenario.tied:  # there, the Trainer writes tied weights under both names
            del expected["lm_head.weight"]
        assert not differing(expected, load_file(out / file))
    beside = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    kept = {"layerstore.json"} | beside & {path.name for path in source.iterdir()}
    assert {path.name for path in out.iterdir()} - files == kept
    assert all((source / file).read_bytes() == (out / file).read_bytes() for file in beside if (out / file).exists())


# -- Transformers itself -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(
    stored_hugging_face: Store, trained_hugging_face: Launch, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return what Transformers makes of the Trainers' own folders, and of exports, by name."""
    root = tmp_path_factory.mktemp("loaded")
    folders: dict[str, Path] = {}
    for name in TRAINERS:
        composite = stored_hugging_face.compose(f"{name}@{RESUME_STEP}")
        folders[f"{name} source"] = HUGGING_FACE_SCENARIO_OF[name].checkpoint(
            trained_hugging_face.root, step=RESUME_STEP
        )
        folders[f"{name} export"] = composite.export(root / name).out
        folders[f"{name} shards"] = composite.export(root / f"{name}-shards", max_shard_size="2KB").out
        dtypes: tuple[DTypeName, ...] = ("fp16", "fp32")
        for dtype in dtypes:
            folders[f"{name} {dtype}"] = composite.export(root / f"{name}-{dtype}", dtype=dtype).out
        other = mixed(stored_hugging_face, f"{name}@4", f"{name}@2")
        folders[f"{name} mixed"] = other.export(root / f"{name}-mixed").out
    described = printed("pretrained", folders.values())
    return {name: described[str(folder)] for name, folder in folders.items()}


@pytest.mark.parametrize("name", TRAINERS)
def test_transformers_loads_what_was_written(name: str, loaded: dict[str, dict[str, Any]]) -> None:
    """An export is the Trainer's own folder to the last bit; others have the type that the config says."""
    types = {"export": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32", "mixed": "torch.bfloat16"}
    described = {kind: loaded[f"{name} {kind}"] for kind in types}

    assert loaded[f"{name} source"] == loaded[f"{name} export"] == loaded[f"{name} shards"]
    assert types == {kind: model["dtype"] for kind, model in described.items()}
    assert [model["complaints"] for model in described.values()] == [{}] * len(types)
    assert len({str(model["tensors"]) for model in described.values()}) == len(types)


# -- arrays --------------------------------------------------------------------------------------------------------


@each_scenario
def test_arrays_hold_what_the_engines_saved(scenario: Scenario, stored: Store, trained: Launch) -> None:
    """Masters, frozen weights and buffers of every scenario, and each rank's own buffers."""
    folder = scenario.tag_dir(trained.root, step=RESUME_STEP)
    expected, buffers = trained_weights(scenario, trained.root), buffer_names(scenario, trained.root)
    composite = stored.compose(f"{scenario.name}@{RESUME_STEP}")
    kinds: tuple[TensorKind, ...] = ("master", "weights", "buffers")
    parts = {kind: composite.tensors(kind) for kind in kinds}

    found = {name: (tensors, name) for tensors in parts.values() for name in tensors}

    assert found.keys() == {name for name, tensor in expected.items() if tensor.numel()}
    assert set(parts["buffers"]) == buffers
    for name, (tensors, _) in found.items():
        bits = expected[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        assert tensors[name].shape == tuple(expected[name].shape)
        assert np.array_equal(bits, np.frombuffer(tensors[name].tobytes(), np.uint8))
    for name in buffers:
        copies = parts["buffers"].parts(name)
        assert len(copies) in {1, 2}
        for rank, copy in enumerate(copies):
            saved = rank_trees(folder, rank)["model_states"]["module"][name]
            bits = saved.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(bits, np.frombuffer(copy.tobytes(), np.uint8))
