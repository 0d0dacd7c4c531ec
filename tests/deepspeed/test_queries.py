"""The query verbs over real checkpoints: what they say is what DeepSpeed's own files hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import layerstore
from layerstore import Store
from tests.deepspeed.compare import checkpoint_differences, full_tensors
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch
from tests.deepspeed.scenarios import (
    GROUPINGS,
    HUGGING_FACE_SCENARIOS,
    RESUME_STEP,
    SAVE_STEPS,
    SCENARIO_OF,
    Scenario,
)

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

LATER_STEP = SAVE_STEPS[1]


def stored(store: Store, trained: Launch, name: str) -> Scenario:
    """Ingest both checkpoints of a scenario."""
    scenario = SCENARIO_OF[name]
    for step in SAVE_STEPS:
        store.ingest(scenario.save_dir(trained.root, step=step), run=name, tag=scenario.tag(step=step))
    return scenario


@pytest.mark.parametrize("name", ["grouped_decay", "grouped_blocks_first", "many_sub_groups", "odd_sizes", "tied"])
def test_distances_are_those_of_deepspeeds_own_masters(name: str, trained: Launch, tmp_path: Path) -> None:
    """Whatever the grouping: distance and angle of every layer are what torch says of the whole masters."""
    with layerstore.init(tmp_path / "store") as store:
        scenario = stored(store, trained, name)
        found = store.diff(f"{name}@{RESUME_STEP}", f"{name}@{LATER_STEP}", stat=True)
    before, after = (full_tensors(scenario.tag_dir(trained.root, step=step)) for step in SAVE_STEPS)

    assert len(found.layers) > 2
    for layer in found.layers:
        parameters = [name for name in before if f"{name}.".startswith(f"{layer.layer}.")]
        if not parameters:
            assert layer.kinds.keys() <= {"buffers"}
            assert layer.distance is None
            continue
        a, b = (torch.cat([side[name]["master"].flatten() for name in parameters]).double() for side in (before, after))
        assert layer.distance is not None
        assert (layer.distance.elements, layer.distance.left_out) == (a.numel(), ())
        assert layer.distance.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()), rel=1e-9)
        assert layer.distance.cosine == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-9)
        assert layer.distance.relative_l2 > 0


def test_one_training_under_other_groupings_is_the_same(trained: Launch, tmp_path: Path) -> None:
    """No layer differs; what is not a layer does, because the optimizer's groups are part of it."""
    first, *others = (f"grouped_{grouping}" for grouping in GROUPINGS)
    with layerstore.init(tmp_path / "store") as store:
        for name in (first, *others):
            stored(store, trained, name)
        found = [store.diff(first, other) for other in others]

    assert {layer.status for diff in found for layer in diff.layers} == {"same"}
    assert {diff.same_state for diff in found} == {False}


def test_frozen_layers_are_the_same_and_counted_once(trained: Launch, tmp_path: Path) -> None:
    """Diff and stats agree on what training left alone."""
    with layerstore.init(tmp_path / "store") as store:
        stored(store, trained, "frozen")
        found = store.diff(f"frozen@{RESUME_STEP}", "frozen")
        stats = store.stats()

    same = {layer.layer for layer in found.layers if layer.status == "same"}
    assert same >= {"embed", "layers.0"}
    assert "layers.1" not in same
    assert same == {name for name, layer in stats.layers.items() if layer.count == 1}
    assert all(stats.layers[name].logical_bytes == 2 * stats.layers[name].unique_bytes for name in same)


def test_all_checkpoints_of_a_trainer_and_of_accelerate_are_found(
    trained_hugging_face: Launch, trained: Launch, tmp_path: Path
) -> None:
    """One command takes all that real libraries have saved, in order, under their own runs' names."""
    root = trained_hugging_face.root
    survey = layerstore.find_checkpoints(*(root / scenario.name for scenario in HUGGING_FACE_SCENARIOS))
    expected = {
        scenario.tag_dir(root, step=step).resolve(): step for scenario in HUGGING_FACE_SCENARIOS for step in SAVE_STEPS
    }

    assert expected.items() <= {found.path: found.step for found in survey.found}.items()
    assert [found.step for found in survey.found] == sorted(found.step or -1 for found in survey.found)
    assert {SCENARIO_OF["tied"].tag_dir(trained.root, step=step).resolve() for step in SAVE_STEPS} == {
        found.path for found in layerstore.find_checkpoints(trained.root / "tied").found
    }
    with layerstore.init(tmp_path / "store") as store:
        for found in survey.found:
            store.ingest(found.folder, tag=found.tag)
        assert {entry.step for entry in store.log("trainer")} >= set(SAVE_STEPS)


def test_a_real_checkpoint_is_dropped_and_comes_back(trained: Launch, tmp_path: Path) -> None:
    """The run means its earlier step meanwhile, and afterwards the later one, bit for bit."""
    name = "grouped_decay"
    with layerstore.init(tmp_path / "store") as store:
        scenario = stored(store, trained, name)
        source = scenario.save_dir(trained.root, step=LATER_STEP)

        store.drop(f"{name}@{LATER_STEP}")
        assert store.show(name).step == RESUME_STEP
        again = store.ingest(source, run=name, tag=scenario.tag(step=LATER_STEP))

        assert (again.is_new, again.objects_new) == (True, 0)
        written = store.compose(name).write(tmp_path / "out")
    assert not checkpoint_differences(
        scenario.tag_dir(trained.root, step=LATER_STEP), written.out / scenario.tag(step=LATER_STEP)
    )
