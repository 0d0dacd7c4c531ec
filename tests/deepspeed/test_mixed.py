"""A composite of several saves loads in DeepSpeed and trains on, each parameter as the plan says."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.layers import layer_of
from tests.deepspeed.compare import checkpoint_differences, differing, full_tensors
from tests.deepspeed.conftest import scenarios_asked
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch
from tests.deepspeed.scenarios import SAVE_STEPS, SCENARIOS, STEPS, Scenario

# The first test to ask for a launch waits for it, on a fresh machine for its compiler too.
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

BASE_STEP = SAVE_STEPS[-1]

# Of two saves the second is not a turn of the filter, so that the rest is of the first.
POLICIES: dict[str, layerstore.Parity | layerstore.Filter] = {
    "parity": layerstore.Parity(),
    "filter": layerstore.Filter(first=1, last=0),
}

NO_MOMENTS_AT_FIRST = {"fp16_no_update_yet"}
"""Scenarios whose first save is from before the optimizer's first update: nothing of it can stand in for later ones."""

each_mixture = pytest.mark.parametrize(
    ("scenario", "policy"),
    list(product(SCENARIOS, POLICIES)),
    ids=lambda value: value.name if isinstance(value, Scenario) else value,
)

sampled = pytest.mark.sample(4, by="scenario", always=("many_sub_groups",))
"""What DeepSpeed takes up: one launch for each policy."""


@pytest.fixture(scope="session")
def mixed(stored: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a composite of both saves of each scenario under each policy."""
    root = tmp_path_factory.mktemp("mixed")
    for scenario, policy in product(SCENARIOS, POLICIES):
        out = scenario.save_dir(root / policy, step=BASE_STEP)
        out.parent.mkdir(parents=True, exist_ok=True)
        stored.compose(scenario.name, policy=POLICIES[policy]).write(out)
    return root


@pytest.fixture(scope="session")
def went_on(request: pytest.FixtureRequest, launch_cache: Path, mixed: Path) -> dict[str, Launch]:
    """Return, by policy, what DeepSpeed made of the composites that tests ask about."""
    names = scenarios_asked(request, "went_on")
    step = ("--step", str(BASE_STEP))
    return {
        policy: cached_launch(launch_cache, "training", *step, resume_from=mixed / policy, names=names)
        for policy in POLICIES
    }


@pytest.mark.known_fault("llmtailor 1", "llmtailor 2", "llmtailor 4", "llmtailor 18")
@each_mixture
def test_each_parameter_comes_bit_for_bit_from_the_save_that_the_plan_names(
    scenario: Scenario, policy: str, trained: Launch, mixed: Path, stored: Store
) -> None:
    """
    Master and every moment, whatever the order of the optimizer's groups.

    Parameters come from both saves, unless the first holds no moments to take.
    """
    plan = stored.compose(scenario.name, policy=POLICIES[policy])
    steps = {layer: choice.step for layer, choice in plan.layers.items()}
    saved = {step: full_tensors(scenario.tag_dir(trained.root, step=step)) for step in SAVE_STEPS}
    composed = full_tensors(scenario.tag_dir(mixed / policy, step=BASE_STEP))

    assert composed.keys() == saved[BASE_STEP].keys()
    mixed_from = {BASE_STEP} if scenario.name in NO_MOMENTS_AT_FIRST else set(SAVE_STEPS)
    assert mixed_from == {steps[layer_of(name)] for name in composed}
    for name, kinds in composed.items():
        assert not differing(saved[steps[layer_of(name)]][name], kinds), name


@pytest.mark.known_fault("llmtailor 6", "llmtailor 8")
@each_mixture
@sampled
def test_what_deepspeed_loads_is_what_was_composed(
    scenario: Scenario, policy: str, mixed: Path, went_on: dict[str, Launch]
) -> None:
    """Saved again right after loading, every tree and tensor is the composite's."""
    composed, saved = (scenario.tag_dir(root, step=BASE_STEP) for root in (mixed / policy, went_on[policy].root))

    assert not checkpoint_differences(composed, saved)


@each_mixture
@sampled
def test_training_goes_on(scenario: Scenario, policy: str, went_on: dict[str, Launch]) -> None:
    """All later steps are taken, with finite losses."""
    trace = went_on[policy].trace(scenario.name)

    assert [entry["step"] for entry in trace] == list(range(BASE_STEP + 1, STEPS + 1))
    assert all(math.isfinite(float.fromhex(loss)) for entry in trace for loss in entry["losses"])
