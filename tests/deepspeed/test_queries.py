"""Queries and recipes over real checkpoints: they say, and compose, what DeepSpeed's own files hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerstore import Store
from tests.deepspeed.compare import differing, full_tensors
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, Launch
from tests.deepspeed.scenarios import (
    GROUPINGS,
    SAVE_STEPS,
    SCENARIO_OF,
)

pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)

OLD, NEW = SAVE_STEPS


@pytest.mark.parametrize("name", ["grouped_decay", "grouped_blocks_first", "many_sub_groups", "odd_sizes", "tied"])
def test_distances_are_those_of_deepspeeds_own_masters(name: str, trained: Launch, stored: Store) -> None:
    """Whatever the grouping: distance and angle of every layer are what torch says of the whole masters."""
    scenario = SCENARIO_OF[name]
    found = stored.diff(f"{name}@{OLD}", f"{name}@{NEW}", stat=True)
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


# -- LLMTailor's recipes -------------------------------------------------------------------------------------------


def parity_recipe(layers: list[str], *, tied: bool) -> str:
    """Return LLMTailor's parity recipe: even blocks and the output side new, odd blocks and the input side old."""
    blocks = sum(name.startswith("model.layers.") for name in layers)
    embedding = blocks + (1 if tied else 2)
    chosen = [(NEW, 0, 0), *((OLD if index % 2 else NEW, index, index + 1) for index in range(blocks))]
    chosen += [] if tied else [(NEW, blocks + 1, blocks + 1)]
    chosen += [(OLD, embedding, embedding)]
    lines = [f"  - {{sources: [{{model: run/checkpoint-{step}, layer_range: [{a}, {b}]}}]}}" for step, a, b in chosen]
    weights = [f"pre_weights: [{{name: model.embed_tokens.weight, model: run/checkpoint-{OLD}}}]"]
    return "\n".join(["slices:", *lines, *weights, "merge_method: passthrough", "dtype: bfloat16", ""])


def meant(parameter: str) -> int:
    """Return the step that parity means for *parameter*: written down independently of the recipe's reader."""
    if parameter.startswith("model.layers."):
        return OLD if int(parameter.split(".")[2]) % 2 else NEW
    return OLD if parameter.startswith("model.embed_tokens.") else NEW


@pytest.mark.known_fault("llmtailor 1")
@pytest.mark.parametrize("name", [*(f"grouped_{grouping}" for grouping in GROUPINGS), "tied"])
def test_llmtailors_recipe_gives_the_tensors_that_its_grammar_means(
    name: str, trained: Launch, stored: Store, tmp_path: Path
) -> None:
    """Whatever the order of the optimizer's groups, tied or not: master and moments of each parameter, bit for bit."""
    recipe = tmp_path / "parity.yaml"
    recipe.write_text(parity_recipe(list(stored.compose(f"{name}@{NEW}").layers), tied=name == "tied"))
    sources = {step: full_tensors(SCENARIO_OF[name].tag_dir(trained.root, step=step)) for step in SAVE_STEPS}

    written = stored.compose(recipe=recipe, run=name).write(tmp_path / "out")

    found = full_tensors(written.out / (written.out / "latest").read_text())
    assert found.keys() == sources[NEW].keys()
    for parameter, tensors in found.items():
        expected, other = (sources[step][parameter] for step in (meant(parameter), OLD + NEW - meant(parameter)))
        assert tensors.keys() >= {"master", "exp_avg", "exp_avg_sq"}
        assert not differing(expected, tensors), parameter
        assert differing(other, tensors), parameter
