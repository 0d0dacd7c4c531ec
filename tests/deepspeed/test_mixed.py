"""A composite of several saves loads in DeepSpeed and trains on, each parameter as the plan says."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest
import torch

import layerstore
from layerstore.layers import layer_of
from tests.deepspeed.compare import checkpoint_differences, full_tensors
from tests.deepspeed.composites import MIXED, Composites
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch
from tests.deepspeed.scenarios import (
    POLICIES,
    SAVE_STEPS,
    SCENARIOS,
    STEPS,
    Scenario,
)

# The first test to ask for a launch waits for it, on a fresh machine for its compiler too.
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

BASE_STEP = SAVE_STEPS[-1]

NO_MOMENTS_AT_FIRST = {"fp16_no_update_yet"}
"""Scenarios whose first save is from before the optimizer's first update: nothing of it can stand in for later ones."""

each_mixture = pytest.mark.parametrize(
    ("scenario", "policy"),
    list(product(SCENARIOS, POLICIES)),
    ids=lambda value: value.name if isinstance(value, Scenario) else value,
)


sampled = pytest.mark.sample(4, by="scenario", always=("many_sub_groups",))
"""What DeepSpeed takes up: one launch for all."""


def sources(store: layerstore.Store, scenario: Scenario, policy: str) -> dict[str, int]:
    """Return the step that the plan takes each layer from."""
    plan = store.compose(scenario.name, policy=MIXED[policy])
    return {layer: choice.step for layer, choice in plan.layers.items()}


@each_mixture
def test_both_saves_are_mixed(
    scenario: Scenario, policy: str, mixed: Composites, mixed_store: layerstore.Store
) -> None:
    """No plan takes all that is trained from one save, unless the first save holds no moments to take."""
    mixed.need(scenario.name)
    trained = {line.layer for line in mixed_store.ls(scenario.name) if line.bytes_by_kind["optimizer"]}
    steps = {step for layer, step in sources(mixed_store, scenario, policy).items() if layer in trained}

    assert steps == ({BASE_STEP} if scenario.name in NO_MOMENTS_AT_FIRST else set(SAVE_STEPS))


@pytest.mark.known_fault("llmtailor 1", "llmtailor 2", "llmtailor 4", "llmtailor 18")
@each_mixture
def test_each_parameter_comes_bit_for_bit_from_the_save_that_the_plan_names(
    scenario: Scenario, policy: str, trained: Launch, mixed: Composites, mixed_store: layerstore.Store
) -> None:
    """Master and every moment, whatever the order of the optimizer's groups."""
    mixed.need(scenario.name)
    steps = sources(mixed_store, scenario, policy)
    saved = {step: full_tensors(scenario.tag_dir(trained.root, step=step)) for step in SAVE_STEPS}
    composed = full_tensors(scenario.tag_dir(mixed.root / policy, step=BASE_STEP))

    assert composed.keys() == saved[BASE_STEP].keys()
    for name, kinds in composed.items():
        expected = saved[steps[layer_of(name)]][name]
        assert kinds.keys() == expected.keys()
        assert all(bits(kinds[kind]) == bits(expected[kind]) for kind in kinds), name


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of *tensor*."""
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.known_fault("llmtailor 6", "llmtailor 8")
@each_mixture
@sampled
def test_what_deepspeed_loads_is_what_was_composed(
    scenario: Scenario, policy: str, mixed: Composites, went_on: Launch
) -> None:
    """Saved again right after loading, every tree and tensor is the composite's."""
    mixed.need(scenario.name)
    composed, saved = (scenario.tag_dir(root / policy, step=BASE_STEP) for root in (mixed.root, went_on.root))

    assert not checkpoint_differences(composed, saved)


@each_mixture
@sampled
def test_training_goes_on(scenario: Scenario, policy: str, mixed: Composites, went_on: Launch) -> None:
    """All later steps are taken, with finite losses."""
    mixed.need(scenario.name)
    trace = Launch(went_on.root / policy).trace(scenario.name)

    assert [entry["step"] for entry in trace] == list(range(BASE_STEP + 1, STEPS + 1))
    assert all(math.isfinite(float.fromhex(loss)) for entry in trace for loss in entry["losses"])


def test_the_summary_lies_beside_the_shards(mixed: Composites) -> None:
    """``layerstore.json`` tells what a folder was made of."""
    folders = [scenario.save_dir(mixed.root / "parity", step=BASE_STEP) for scenario in SCENARIOS]

    assert all((Path(folder) / "layerstore.json").is_file() for folder in folders)
