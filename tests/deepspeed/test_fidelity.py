"""A composite of one step is that step's checkpoint: every bit that counts, in the same layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import layerstore
from tests.deepspeed.compare import checkpoint_differences, file_tree, full_tensors, shard_names, tree_differences
from tests.deepspeed.conftest import write_composite
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch
from tests.deepspeed.scenarios import (
    GROUPINGS,
    HUGGING_FACE_SCENARIO_OF,
    HUGGING_FACE_SCENARIOS,
    POKED,
    POKED_FOLDER,
    RESUME_STEP,
    SCENARIO_OF,
    SCENARIOS,
    WORLD_SIZE,
    HuggingFaceScenario,
    Scenario,
)

# The first test to ask for a launch waits for it, on a fresh machine for its compiler too.
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
each_library = pytest.mark.parametrize("scenario", HUGGING_FACE_SCENARIOS, ids=lambda scenario: scenario.name)

REPORT = "layerstore.json"
"""The one file that a composite has and its source has not."""


@pytest.mark.fault(69)
@each_scenario
def test_a_composite_equals_its_source_bit_for_bit(scenario: Scenario, trained: Launch, composed: Path) -> None:
    """Names of files, trees, hyperparameters, masters, moments, buffers and fragments are the source's."""
    source, composite = (scenario.tag_dir(root, step=RESUME_STEP) for root in (trained.root, composed))

    assert not checkpoint_differences(source, composite)
    assert source.name == (composite.parent / "latest").read_text()


@each_library
def test_a_composite_of_a_trainers_checkpoint_has_its_files_byte_for_byte(
    scenario: HuggingFaceScenario, trained_hugging_face: Launch, composed_hugging_face: Path
) -> None:
    """Gathered weights, scheduler, random states and all small files come back as they were."""
    assert_same_checkpoint(scenario, trained_hugging_face.root, composed_hugging_face)


@pytest.mark.fault(68)
@pytest.mark.parametrize("name", POKED)
def test_special_bit_patterns_survive(name: str, trained: Launch, tmp_path: Path) -> None:
    """NaN payloads, -0.0, infinities and subnormals come out of any tensor as they went in."""
    scenario, root = SCENARIO_OF[name], trained.root / POKED_FOLDER
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(scenario.save_dir(root, step=RESUME_STEP), run=name)
        write_composite(store, name, scenario.save_dir(tmp_path, step=RESUME_STEP))

    assert not checkpoint_differences(*(scenario.tag_dir(folder, step=RESUME_STEP) for folder in (root, tmp_path)))


def test_weights_that_do_not_follow_from_their_masters_survive(trained_hugging_face: Launch, tmp_path: Path) -> None:
    """Where rounding the master does not give the gathered weight, the weight's own bytes come back."""
    scenario = HUGGING_FACE_SCENARIO_OF["trainer"]
    source = scenario.checkpoint(tmp_path / "source", step=RESUME_STEP)
    shutil.copytree(scenario.checkpoint(trained_hugging_face.root, step=RESUME_STEP), source)
    overwrite_weight_bits(source / "model.safetensors")
    with layerstore.init(tmp_path / "store") as store:
        store.ingest(source, run=scenario.name)
        write_composite(store, scenario.name, scenario.checkpoint(tmp_path / "out", step=RESUME_STEP))

    assert_same_checkpoint(scenario, tmp_path / "source", tmp_path / "out")


@pytest.mark.known_fault("llmtailor 1")
def test_layers_are_stored_once_whatever_the_grouping(trained: Launch, tmp_path: Path) -> None:
    """One training saved under three groupings of its optimizer adds its layers only once."""
    scenarios = [SCENARIO_OF[f"grouped_{grouping}"] for grouping in GROUPINGS]
    tensors = [full_tensors(scenario.tag_dir(trained.root, step=RESUME_STEP)) for scenario in scenarios]
    # Else the groupings had changed the arithmetic, and nothing could be shared.
    assert not any(tree_differences(tensors[0], other) for other in tensors[1:])
    store = layerstore.init(tmp_path / "store")

    first, *others = (
        store.ingest(
            scenario.save_dir(trained.root, step=RESUME_STEP),
            run=scenario.name,
            tag=scenario.tag(step=RESUME_STEP),
        )
        for scenario in scenarios
    )

    # Param groups belong to each rank's state, and one state per rank is all that is new.
    expected = (WORLD_SIZE, first.objects_new - WORLD_SIZE)
    assert first.objects_new > WORLD_SIZE
    assert [expected] * 2 == [(other.objects_new, other.objects_reused) for other in others]


def assert_same_checkpoint(scenario: HuggingFaceScenario, source: Path, composite: Path) -> None:
    """Assert equal shards, and equal bytes in every other file, below two launches' folders."""
    shards = [scenario.tag_dir(root, step=RESUME_STEP) for root in (source, composite)]
    others = [
        {
            path: payload
            for path, payload in file_tree(scenario.checkpoint(root, step=RESUME_STEP)).items()
            if path != REPORT and not path.startswith(f"{shards[0].name}/")
        }
        for root in (source, composite)
    ]

    assert shard_names(shards[0]) == shard_names(shards[1])
    assert not checkpoint_differences(shards[0], shards[1])
    assert others[0] == others[1]


def overwrite_weight_bits(path: Path) -> None:
    """Put half-precision NaNs with payloads and -0.0 into the first tensor of the safetensors file *path*."""
    payload = bytearray(path.read_bytes())
    data = 8 + int.from_bytes(payload[:8], "little")
    for index, bits in enumerate((0x7FC1, 0x7F81, 0xFFFF, 0x8000)):
        payload[data + 2 * index : data + 2 * index + 2] = bits.to_bytes(2, "little")
    path.write_bytes(payload)
