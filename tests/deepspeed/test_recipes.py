"""Recipes over checkpoints of real DeepSpeed: every tensor comes from the step that the grammar means, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from tests.deepspeed.compare import full_tensors, raw_bytes
from tests.deepspeed.launch import Launch
from tests.deepspeed.scenarios import GROUPINGS, SAVE_STEPS, SCENARIOS

OLD, NEW = SAVE_STEPS


@dataclass(frozen=True)
class History:
    """Both checkpoints of one scenario, in a store and on disk."""

    store: Store
    run: str
    folders: dict[int, Path]
    """By step: the folder that holds the shards."""

    @property
    def layers(self) -> list[str]:
        """The model's layers."""
        return list(self.store.compose(f"{self.run}@{NEW}").layers)

    def steps(self, recipe: str, path: Path) -> dict[str, int]:
        """Return the step that *recipe*, written to *path*, takes each layer from."""
        path.write_text(recipe)
        return {layer: choice.step for layer, choice in self.store.compose(recipe=path, run=self.run).layers.items()}

    def write(self, recipe: str, out: Path) -> Path:
        """Write the composite that *recipe* means to *out*; return the folder that holds the shards."""
        path = out.with_suffix(".yaml")
        path.write_text(recipe)
        self.store.compose(recipe=path, run=self.run).write(out)
        return out / (out / "latest").read_text()


def history(trained: Launch, name: str, tmp_path: Path) -> History:
    """Ingest both checkpoints of the scenario *name*."""
    scenario = next(one for one in SCENARIOS if one.name == name)
    store = layerstore.init(tmp_path / "store")
    for step in SAVE_STEPS:
        store.ingest(scenario.save_dir(trained.root, step=step), run=name, tag=scenario.tag(step=step))
    return History(store, name, {step: scenario.tag_dir(trained.root, step=step) for step in SAVE_STEPS})


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
def test_llmtailors_recipe_gives_the_tensors_that_its_grammar_means(trained: Launch, tmp_path: Path, name: str) -> None:
    """Whatever the order of the optimizer's groups, tied or not: master and moments of each parameter, bit for bit."""
    known = history(trained, name, tmp_path)
    recipe = parity_recipe(known.layers, tied=name == "tied")
    sources = {step: full_tensors(folder) for step, folder in known.folders.items()}

    found = full_tensors(known.write(recipe, tmp_path / "out"))

    assert found.keys() == sources[NEW].keys()
    for parameter, tensors in found.items():
        expected, other = (sources[step][parameter] for step in (meant(parameter), OLD + NEW - meant(parameter)))
        assert tensors.keys() == expected.keys() >= {"master", "exp_avg", "exp_avg_sq"}
        assert all((raw_bytes(tensors[kind]) == raw_bytes(expected[kind])).all() for kind in tensors), parameter
        assert any((raw_bytes(tensors[kind]) != raw_bytes(other[kind])).any() for kind in tensors), parameter


def test_both_grammars_say_the_same_of_a_real_model(trained: Launch, tmp_path: Path) -> None:
    """Moving over from LLMTailor changes the words, not the layers."""
    known = history(trained, "grouped_blocks_first", tmp_path)
    ours = f"""
base: {NEW}
layers:
  "model.layers.[odd]": {OLD}
  model.embed_tokens: {OLD}
rest: base
"""

    theirs = known.steps(parity_recipe(known.layers, tied=False), tmp_path / "theirs.yaml")

    assert theirs == known.steps(ours, tmp_path / "ours.yaml")
    assert set(theirs.values()) == {OLD, NEW}
