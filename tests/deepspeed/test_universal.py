"""Universal Checkpoints of composites: DeepSpeed loads them on any number of ranks, with each group's settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from layerstore import Store
from layerstore.errors import LayoutMismatch
from tests.deepspeed.compare import differing, full_tensors, rank_trees, whole_weights
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch
from tests.deepspeed.scenarios import RESUME_STEP, SCENARIO_OF, SCENARIOS, Scenario

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

NOT_KNOWN = {"sgd": "momentum_buffer", "amsgrad": "exp_avg, exp_avg_sq, max_exp_avg_sq", "fp16_no_update_yet": "no"}
"""DeepSpeed's loader asks for Adam's two moments."""

OTHERS_TOO = {"tied", "frozen", "odd_sizes", "fp32", "configured", "many_sub_groups"}
"""Scenarios that one rank loads as well."""

OF_OTHER_STAGES = {"stage1_fp32_gradients", "stage2_frozen"}
"""One of each; on their way out they are shards of stage 3 as all others."""

DEALT = "stage2_round_robin"
"""DeepSpeed's loader takes parameters for where they would be without."""

LOADED = [
    scenario
    for scenario in SCENARIOS
    if scenario.name not in NOT_KNOWN and (scenario.stage == 3 or scenario.name in OF_OTHER_STAGES)
]

each_scenario = pytest.mark.parametrize("scenario", LOADED, ids=lambda scenario: scenario.name)


@pytest.fixture(scope="session")
def written(stored: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Universal Checkpoint of each scenario, laid out like a launch."""
    root = tmp_path_factory.mktemp("universal")
    for scenario in LOADED:
        out = scenario.save_dir(root, step=RESUME_STEP)
        out.parent.mkdir(parents=True, exist_ok=True)
        stored.compose(f"{scenario.name}@{RESUME_STEP}").export(out, format="universal")
    return root


@pytest.fixture(scope="session")
def resumed(written: Path, launch_cache: Path) -> Callable[[int], Launch]:
    """Return a function that has DeepSpeed load all of them, and save them again, by a number of ranks."""

    @cache
    def launched(world_size: int) -> Launch:
        options = ("--universal", "--until", str(RESUME_STEP + 1))
        names = [each.name for each in LOADED if world_size == 3 or each.name in OTHERS_TOO]
        return cached_launch(
            launch_cache, "training", *options, resume_from=written, names=names, world_size=world_size
        )

    return launched


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [(each, count) for each in LOADED for count in ((1, 3) if each.name in OTHERS_TOO else (3,))],
    ids=lambda value: value.name if isinstance(value, Scenario) else value,
)
def test_deepspeed_loads_masters_moments_and_settings(
    scenario: Scenario, world_size: int, trained: Launch, resumed: Callable[[int], Launch]
) -> None:
    """On another number of ranks, to the last bit; weight decay is that of each group."""
    saved, loaded = (scenario.tag_dir(root, step=RESUME_STEP) for root in (trained.root, resumed(world_size).root))

    expected, found = full_tensors(saved), full_tensors(loaded)
    assert expected.keys() == found.keys()
    assert not [name for name in expected if differing(expected[name], found[name])]
    before, after = (rank_trees(folder, 0)["optim_states"]["optimizer_state_dict"] for folder in (saved, loaded))
    inner = "optimizer_state_dict" if scenario.stage == 3 else "base_optimizer_state"
    groups = [tree[inner]["param_groups"] for tree in (before, after)]
    assert settings(groups[0]) == settings(groups[1])
    counts = [{int(of["step"]) for of in tree[inner]["state"].values()} for tree in (before, after)]
    assert counts[0] == counts[1]


def settings(groups: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return what param groups hold besides their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


@each_scenario
def test_training_goes_on(scenario: Scenario, resumed: Callable[[int], Launch]) -> None:
    """The next step is taken."""
    trace = resumed(3).trace(scenario.name)

    assert [entry["step"] for entry in trace] == [RESUME_STEP + 1]


def test_frozen_and_tied_parameters_are_in_it(trained: Launch, written: Path) -> None:
    """Which DeepSpeed's own converter leaves out of a ZeRO-3 checkpoint."""
    for name in ("frozen", "tied"):
        scenario = next(each for each in LOADED if each.name.startswith(name))
        zero = next(scenario.save_dir(written, step=RESUME_STEP).glob("*_universal/zero"))
        weights = whole_weights(scenario.tag_dir(trained.root, step=RESUME_STEP))
        assert len(weights) > 2
        for parameter, expected in weights.items():
            found = torch.load(zero / parameter / "fp32.pt")["param"]
            assert torch.equal(found, expected.float()), parameter
    shards = rank_trees(scenario.tag_dir(trained.root, step=RESUME_STEP), 0)["model_states"]["shared_params"]
    assert shards
    for alias, of in shards.items():
        assert (zero / alias / "exp_avg.pt").samefile(zero / of / "exp_avg.pt")


def test_what_deepspeed_would_misplace_is_told(stored: Store, tmp_path: Path) -> None:
    """With what would do instead."""
    written = stored.compose(f"{DEALT}@{RESUME_STEP}").export(tmp_path / "out", format="universal")

    assert "round_robin_gradients" in " ".join(written.notes)


@pytest.mark.parametrize(("name", "kept"), NOT_KNOWN.items())
def test_other_optimizers_are_refused(name: str, kept: str, stored: Store, tmp_path: Path) -> None:
    """In one line that says what would do instead; nothing is written."""
    with pytest.raises(LayoutMismatch, match=f"keeps {kept}.*DeepSpeed's loader") as refused:
        stored.compose(f"{SCENARIO_OF[name].name}@{RESUME_STEP}").export(tmp_path / "out", format="universal")

    assert "--format shards --world-size N" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()
