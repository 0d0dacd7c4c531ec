"""A run saved by two ranks goes on on one, three or four, in real DeepSpeed: every number is where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from layerstore import Store
from layerstore.compose import compose_latest
from layerstore.composite import Composite
from layerstore.history import resolve
from tests.deepspeed.compare import (
    checkpoint_differences,
    full_tensors,
    rank_trees,
    tree_differences,
)
from tests.deepspeed.conftest import scenarios_asked
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch, cached_launch, printed
from tests.deepspeed.scenarios import (
    HUGGING_FACE_SCENARIOS,
    RESUME_STEP,
    SAVE_STEPS,
    SCENARIO_OF,
    SCENARIOS,
    STEPS,
    Scenario,
)

# The first test to ask for a launch waits for it, on a fresh machine for its compiler too.
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

ONE_STEP = ("--until", str(RESUME_STEP + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """Composites for one world size, and what DeepSpeed made of them."""

    world_size: int
    composed: Path
    taken_up: Launch
    consolidated: dict[str, tuple[Any, Any]]
    """By scenario, what zero_to_fp32 makes of the source and of the composite."""


def each(test: Callable[..., None]) -> Callable[..., None]:
    """Ask for every scenario at every world size; a usual run, for some at one, which is one launch."""
    for mark in (
        pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name),
        pytest.mark.sample(4, by="scenario", always=("rank_buffers",)),
        pytest.mark.parametrize("world_size", [1, 3, 4]),
        pytest.mark.sample(1, by="world_size"),
    ):
        test = mark(test)
    return test


@pytest.fixture(scope="session")
def resizings(
    request: pytest.FixtureRequest,
    trained: Launch,
    stored: Store,
    launch_cache: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], Resized]:
    """Return what composes for a world size all that tests ask about, and lets as many ranks take it up: once."""

    @cache
    def resize(world_size: int) -> Resized:
        composed = tmp_path_factory.mktemp(f"resized-{world_size}")
        names = scenarios_asked(request, "resized", world_size=world_size)
        for name in names:
            out = SCENARIO_OF[name].save_dir(composed, step=RESUME_STEP)
            out.parent.mkdir(parents=True, exist_ok=True)
            stored.compose(f"{name}@{RESUME_STEP}").write(out, world_size=world_size)
        launch = cached_launch(
            launch_cache, "training", *ONE_STEP, resume_from=composed, names=names, world_size=world_size
        )
        return Resized(
            world_size=world_size,
            composed=composed,
            taken_up=launch,
            consolidated=consolidate(names, trained.root, composed),
        )

    return resize


@pytest.fixture
def resized(world_size: int, resizings: Callable[[int], Resized]) -> Resized:
    """Return the composites for the world size that the test is about."""
    return resizings(world_size)


def consolidate(names: Iterable[str], source: Path, composed: Path) -> dict[str, tuple[Any, Any]]:
    """Return, by scenario, what DeepSpeed's zero_to_fp32 makes of the first save below both roots."""
    folders = {
        name: [
            f"{SCENARIO_OF[name].save_dir(root, step=RESUME_STEP)}:{SCENARIO_OF[name].tag(step=RESUME_STEP)}"
            for root in (source, composed)
        ]
        for name in names
    }
    digests = printed("consolidate", chain.from_iterable(folders.values()))
    return {name: (digests[before], digests[after]) for name, (before, after) in folders.items()}


@pytest.mark.known_fault("llmtailor 11")
@each
def test_deepspeed_saves_what_the_composite_holds(resized: Resized, scenario: Scenario) -> None:
    """
    Loaded and saved again by an engine of this size, every tree and tensor is the composite's, padding aside.

    So names, sub-groups, hyperparameters, counters and the placing of every slice are DeepSpeed's own.
    """
    folders = (scenario.tag_dir(root, step=RESUME_STEP) for root in (resized.composed, resized.taken_up.root))

    differences = checkpoint_differences(*folders)
    # DeepSpeed marks its own buffers, and reads no mark: composites for other ranks have none.
    differences = [text for text in differences if not text.endswith("[] != [\"'ds_id'\"]")]
    if "round_robin_gradients" in scenario.zero:  # DeepSpeed notes the places that they would have without
        differences = [text for text in differences if "['param_slice_mappings']" not in text]
    assert differences == []


@each
def test_every_parameter_keeps_its_master_and_moments(resized: Resized, scenario: Scenario, trained: Launch) -> None:
    """What the engine holds, put together from all its ranks, is bit for bit what the two ranks had saved."""
    source, taken_up = (
        full_tensors(scenario.tag_dir(root, step=RESUME_STEP)) for root in (trained.root, resized.taken_up.root)
    )

    assert source
    assert not tree_differences(source, taken_up)


@each
def test_training_goes_on(resized: Resized, scenario: Scenario) -> None:
    """The next step has a loss on every rank and a norm, none of them broken."""
    (entry,) = resized.taken_up.trace(scenario.name)

    assert entry["step"] == RESUME_STEP + 1
    assert len(entry["losses"]) == resized.world_size
    assert all(math.isfinite(float.fromhex(loss)) for loss in entry["losses"])


@each
def test_deepspeeds_own_converter_gives_the_same_weights(resized: Resized, scenario: Scenario) -> None:
    """zero_to_fp32 gives the same names, shapes and bits as from the source, or fails at both."""
    source, composite = resized.consolidated[scenario.name]

    assert ("error" in source) == ("error" in composite)
    if "error" not in source:
        assert source == composite


@pytest.mark.known_fault("llmtailor 8")
@pytest.mark.exhaustive
@pytest.mark.parametrize("grouping", ["blocks_first", "auxiliary_first"])
def test_layers_of_another_step_keep_their_count_in_the_engine(
    grouping: str, trained: Launch, stored: Store, launch_cache: Path, tmp_path: Path
) -> None:
    """A composite of two steps for three ranks, with a param group per layer: numbers and counters are the layers'."""
    scenario = SCENARIO_OF[f"grouped_{grouping}"]
    sources = [scenario.tag_dir(trained.root, step=step) for step in SAVE_STEPS]
    base, later = (resolve(stored._repo, f"{scenario.name}@{step}") for step in SAVE_STEPS)
    pairs = zip(base.record.layers, later.record.layers, strict=True)
    layers = tuple(new if "layers.1" in old.layer else old for old, new in pairs)
    composition = replace(compose_latest(base), layers=layers)
    out = scenario.save_dir(tmp_path / "out", step=RESUME_STEP)
    out.parent.mkdir(parents=True)
    Composite(stored._repo, composition).write(out, world_size=3, adam_step="per-layer")

    launch = cached_launch(
        launch_cache, "training", *ONE_STEP, resume_from=tmp_path / "out", names=[scenario.name], world_size=3
    )

    taken_up = scenario.tag_dir(launch.root, step=RESUME_STEP)
    older, newer = (full_tensors(source) for source in sources)
    expected = {name: newer[name] if "layers.1." in name else of for name, of in older.items()}
    assert not tree_differences(expected, full_tensors(taken_up))
    trees = rank_trees(taken_up, 0)
    states = trees["optim_states"]["optimizer_state_dict"]["optimizer_state_dict"]["state"]
    for group, shapes in enumerate(trees["model_states"]["param_shapes"]):
        steps = {SAVE_STEPS["layers.1." in name] for name in shapes}
        assert steps == {float(states[group]["step"])}


# -- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_trainer_and_accelerate_go_on_at_another_size(
    world_size: int, stored_hugging_face: Store, launch_cache: Path, tmp_path: Path
) -> None:
    """Without random states, resumed by their own means, both train to the last step."""
    names = [scenario.name for scenario in HUGGING_FACE_SCENARIOS]
    for scenario in HUGGING_FACE_SCENARIOS:
        out = scenario.checkpoint(tmp_path / "out", step=RESUME_STEP)
        out.parent.mkdir(parents=True)
        stored_hugging_face.compose(f"{scenario.name}@{RESUME_STEP}").write(out, world_size=world_size)

    launch = cached_launch(launch_cache, "trainer", resume_from=tmp_path / "out", names=names, world_size=world_size)

    for name in names:
        trace = launch.trace(name)
        assert list(range(RESUME_STEP + 1, STEPS + 1)) == [entry["step"] for entry in trace]
        assert all(len(entry["losses"]) == world_size for entry in trace)
