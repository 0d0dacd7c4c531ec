"""ZeRO-3 to PyTorch's distributed checkpoints, on under FSDP2 by any number of ranks, and back: no bit is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from layerstore import Store
from tests.deepspeed.compare import whole_weights
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch
from tests.deepspeed.scenarios import RESUME_STEP, SCENARIOS, Scenario

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

NOT_ADAM = {"sgd"}
WITHOUT_MOMENTS = {"fp16_no_update_yet"}
WITHOUT_FROZEN = {scenario.name for scenario in SCENARIOS if scenario.exclude_frozen}

LIKE_OTHERS = {"stage1_frozen", "stage2_frozen", "stage2_fp32", "stage2_aligned", "stage2_offloaded"}
"""On the way out, stages make no difference; one or two of each are enough."""

ROUND_TRIPS = [each for each in SCENARIOS if each.name not in NOT_ADAM | WITHOUT_MOMENTS | WITHOUT_FROZEN | LIKE_OTHERS]

OTHERS_TOO = {"tied", "frozen", "odd_sizes", "fp32", "configured", "many_sub_groups"}
"""Scenarios that go on by one and by three ranks as well; three take turns on two processors."""

TRAINED_FOR = RESUME_STEP + 2

each_scenario = pytest.mark.parametrize("scenario", ROUND_TRIPS, ids=lambda scenario: scenario.name)


@pytest.fixture(scope="session")
def written(stored: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a distributed checkpoint of each scenario."""
    root = tmp_path_factory.mktemp("dcp")
    for scenario in ROUND_TRIPS:
        stored.compose(f"{scenario.name}@{RESUME_STEP}").export(root / scenario.name, format="dcp")
    return root


@pytest.fixture(scope="session")
def under_fsdp(written: Path, launch_cache: Path) -> Callable[[int], Launch]:
    """Return a function that goes on under FSDP2 with all scenarios, by a number of ranks."""

    @cache
    def launched(world_size: int) -> Launch:
        options = ("--flat",) if world_size == 3 else ()
        names = [each.name for each in ROUND_TRIPS if world_size == 2 or each.name in OTHERS_TOO]
        return cached_launch(launch_cache, "fsdp", *options, resume_from=written, names=names, world_size=world_size)

    return launched


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [(each, count) for each in ROUND_TRIPS for count in ((1, 2, 3) if each.name in OTHERS_TOO else (2,))],
    ids=lambda value: value.name if isinstance(value, Scenario) else value,
)
def test_masters_and_moments_come_back_bit_for_bit(
    scenario: Scenario, world_size: int, stored: Store, under_fsdp: Callable[[int], Launch]
) -> None:
    """Loaded and saved by FSDP2 it is the same commit, unless ranks had buffers of their own: there is one then."""
    base, folder = f"{scenario.name}@{RESUME_STEP}", under_fsdp(world_size).root / scenario.name / "loaded"

    back = stored.ingest(folder, onto=base, run=f"{scenario.name}-{world_size}")

    versions = {name: choice.version for name, choice in stored.compose(base).layers.items()}
    found = {name: choice.version for name, choice in stored.compose(f"{back.run}@{back.step}").layers.items()}
    if scenario.model != "norm_statistics":
        assert found == versions
        assert not stored.ingest(folder, onto=base).is_new
    for kind in ("master", "optimizer"):
        ours, theirs = (stored.compose(ref).tensors(kind) for ref in (base, f"{back.run}@{back.step}"))
        assert {name: ours[name].tobytes() for name in ours} == {name: theirs[name].tobytes() for name in theirs}


@pytest.mark.fault(151)
@each_scenario
def test_a_full_state_dict_is_the_same_commit(
    scenario: Scenario, stored: Store, under_fsdp: Callable[[int], Launch]
) -> None:
    """The form that the Trainer saves by default holds what the other one does."""
    root = under_fsdp(2).root / scenario.name

    sharded, full = (
        stored.ingest(root / form, onto=f"{scenario.name}@{RESUME_STEP}", run=f"{scenario.name}-{form}")
        for form in ("loaded", "full")
    )

    expected, found = (stored.compose(f"{of.run}@{of.step}").layers for of in (sharded, full))
    assert {name: of.version for name, of in found.items()} == {name: of.version for name, of in expected.items()}


@each_scenario
def test_the_first_loss_is_that_of_deepspeed(
    scenario: Scenario, trained: Launch, under_fsdp: Callable[[int], Launch]
) -> None:
    """To the noise of the type that it computes in: kernels and casts are others."""
    found = under_fsdp(2).trace(scenario.name)[0]["losses"]
    entries = [entry for entry in trained.trace(scenario.name) if entry["step"] == RESUME_STEP + 1]
    expected = [float.fromhex(loss) for loss in entries[0]["losses"]]
    noise = 1e-6 if scenario.precision == "fp32" else 2e-2

    assert found == pytest.approx(expected, rel=noise)


@each_scenario
def test_training_under_fsdp_goes_back_to_deepspeed(
    scenario: Scenario, stored: Store, under_fsdp: Callable[[int], Launch], tmp_path: Path
) -> None:
    """What FSDP2 trained is what shards are made of, at a step that counts its updates."""
    root = under_fsdp(2).root / scenario.name

    saved = stored.ingest(root / "trained", onto=f"{scenario.name}@{RESUME_STEP}", run=f"{scenario.name}-on")
    stored.compose(f"{saved.run}@{saved.step}").write(tmp_path / "out")

    assert saved.step == TRAINED_FOR
    tag = (tmp_path / "out" / "latest").read_text()
    weights = whole_weights(tmp_path / "out" / tag)
    theirs = torch.load(root / "trained.pt")
    assert all(torch.equal(weights[name], theirs[name].to(weights[name].dtype)) for name in weights)
