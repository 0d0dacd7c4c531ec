"""Training that goes on from a composite is the training that was never interrupted, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deepspeed.compare import checkpoint_differences, file_tree
from tests.deepspeed.conftest import scenarios_asked
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch
from tests.deepspeed.scenarios import (
    FROM_SHARDS_FOLDER,
    HUGGING_FACE_SCENARIOS,
    RESUME_STEP,
    SAVE_STEPS,
    SCENARIOS,
    STEPS,
    HuggingFaceScenario,
    Scenario,
)

# The first test to ask for a launch waits for it, on a fresh machine for its compiler too.
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

LATER = range(RESUME_STEP + 1, STEPS + 1)

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
sampled = pytest.mark.sample(6, by="scenario", always=("usual_betas",))
each_library = pytest.mark.parametrize("scenario", HUGGING_FACE_SCENARIOS, ids=lambda scenario: scenario.name)


@pytest.fixture(scope="session")
def resumed(request: pytest.FixtureRequest, launch_cache: Path, composed: Path) -> Launch:
    """Return the training that went on from the composites that tests ask about."""
    names = scenarios_asked(request, "resumed")
    return cached_launch(launch_cache, "training", resume_from=composed, names=names)


@pytest.fixture(scope="session")
def resumed_hugging_face(launch_cache: Path, composed_hugging_face: Path) -> Launch:
    """Return what the Trainer and Accelerate made of the composites."""
    return cached_launch(launch_cache, "trainer", resume_from=composed_hugging_face)


@each_scenario
@sampled
def test_a_resumed_run_has_the_losses_and_norms_of_the_uninterrupted_one(
    scenario: Scenario, trained: Launch, resumed: Launch
) -> None:
    """
    After a composite of step 2, every later loss, gradient norm and learning rate has the same bits.

    So has DeepSpeed's own resume, but with its C++ Adam: there a composite does what the source's shards do.
    """
    assert expected(scenario, trained).trace(scenario.name)[-len(LATER) :] == resumed.trace(scenario.name)
    assert [entry["step"] for entry in resumed.trace(scenario.name)] == list(LATER)


@each_scenario
@sampled
def test_a_resumed_run_saves_what_the_uninterrupted_one_saved(
    scenario: Scenario, trained: Launch, resumed: Launch
) -> None:
    """Two steps after resuming, DeepSpeed saves the same trees and tensors as if nothing had happened."""
    launches = (expected(scenario, trained), resumed)
    source, actual = (scenario.tag_dir(launch.root, step=SAVE_STEPS[1]) for launch in launches)

    assert not checkpoint_differences(source, actual)


def expected(scenario: Scenario, trained: Launch) -> Launch:
    """Return the training that a resumed one is to be: the uninterrupted one, unless DeepSpeed's own resume is not."""
    return trained if scenario.resumes_alike else Launch(trained.root / FROM_SHARDS_FOLDER)


@each_library
def test_a_resumed_trainer_has_the_losses_and_norms_of_the_uninterrupted_one(
    scenario: HuggingFaceScenario,
    trained_hugging_face: Launch,
    resumed_hugging_face: Launch,
) -> None:
    """Resumed by its library's own means, dropout and all, every later loss and norm has the same bits."""
    assert trained_hugging_face.trace(scenario.name)[RESUME_STEP:] == resumed_hugging_face.trace(scenario.name)


@each_library
def test_a_resumed_trainer_saves_what_the_uninterrupted_one_saved(
    scenario: HuggingFaceScenario,
    trained_hugging_face: Launch,
    resumed_hugging_face: Launch,
) -> None:
    """Two steps after resuming, the shards are equal and all other files have the same bytes."""
    roots = (trained_hugging_face.root, resumed_hugging_face.root)
    expected, actual = (scenario.tag_dir(root, step=SAVE_STEPS[1]) for root in roots)
    others = [
        {
            path: payload
            for path, payload in file_tree(scenario.checkpoint(root, step=SAVE_STEPS[1])).items()
            # The arguments name the output folder and the checkpoint resumed from.
            if expected.name not in path and path != "training_args.bin"
        }
        for root in roots
    ]

    assert not checkpoint_differences(expected, actual)
    assert others[0] == others[1]
