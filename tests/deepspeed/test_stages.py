"""What stages 1 and 2 have saved goes on under stage 3: a composite as ZeRO-3 is what DeepSpeed itself would save."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerstore import Store
from tests.deepspeed.compare import checkpoint_differences, full_tensors, tree_differences, whole_weights
from tests.deepspeed.conftest import scenarios_asked
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch
from tests.deepspeed.scenarios import RESUME_STEP, SCENARIOS, Scenario

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

STAGED = [scenario for scenario in SCENARIOS if scenario.stage != 3]

each_scenario = pytest.mark.parametrize("scenario", STAGED, ids=lambda scenario: scenario.name)
sampled = pytest.mark.sample(4, by="scenario", always=("stage1_fp32_gradients",))


@pytest.fixture(scope="session")
def written(stored: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with each of them as ZeRO-3, laid out like a launch."""
    root = tmp_path_factory.mktemp("as-zero3")
    for scenario in STAGED:
        out = scenario.save_dir(root, step=RESUME_STEP)
        out.parent.mkdir(parents=True, exist_ok=True)
        result = stored.compose(f"{scenario.name}@{RESUME_STEP}").write(out, as_zero3=True)
        assert any("sub_group_size 1000000000" in note for note in result.notes)
    return root


@pytest.fixture(scope="session")
def under_stage_3(request: pytest.FixtureRequest, written: Path, launch_cache: Path) -> Launch:
    """Return what engines under stage 3 made of those that tests ask about."""
    names = scenarios_asked(request, "under_stage_3")
    return cached_launch(launch_cache, "training", "--under-stage-3", resume_from=written, names=names)


@each_scenario
@sampled
def test_training_goes_on_as_if_nothing_had_changed(scenario: Scenario, trained: Launch, under_stage_3: Launch) -> None:
    """Every later loss has the bits that it has under the stage that saved; norms are added up in another order."""
    before, after = (launch.trace(scenario.name) for launch in (trained, under_stage_3))

    kept = ("step", "losses", "learning_rates", "skipped")
    assert [[entry[key] for key in kept] for entry in before[RESUME_STEP:]] == [
        [entry[key] for key in kept] for entry in after
    ]


@each_scenario
@sampled
def test_deepspeed_saves_what_the_composite_holds(
    scenario: Scenario, trained: Launch, written: Path, under_stage_3: Launch
) -> None:
    """Loaded and saved again, trees and tensors are the composite's, and the tensors those of the stage that saved."""
    source, composed, saved = (
        scenario.tag_dir(root, step=RESUME_STEP) for root in (trained.root, written, under_stage_3.root)
    )

    assert not tree_differences(full_tensors(source), full_tensors(saved))
    differences = checkpoint_differences(composed, saved)
    # The engine has its own config, stage 1 does not say that nothing is frozen, and DeepSpeed marks its own buffers.
    odd = ("ds_config", *(("frozen_param",) if scenario.stage == 1 else ()))
    assert [
        text
        for text in differences
        if not any(word in text for word in odd) and not text.endswith("[] != [\"'ds_id'\"]")
    ] == []


def test_frozen_weights_become_slices(trained: Launch, written: Path) -> None:
    """Whole in the module under stages 1 and 2, apart under stage 3."""
    for scenario in (each for each in STAGED if each.frozen and not each.exclude_frozen):
        source, composed = (scenario.tag_dir(root, step=RESUME_STEP) for root in (trained.root, written))
        before, after = whole_weights(source), whole_weights(composed)
        assert len(after) > len(full_tensors(composed))
        assert not tree_differences(before, {name: after[name] for name in before})
