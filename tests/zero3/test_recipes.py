"""Recipes over checkpoints of real DeepSpeed: every tensor comes from the step that the grammar means, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import layerstore
from layerstore.model import LayerEntry
from layerstore.ops.compose import Composition, execute_compose
from layerstore.ops.progress import Silent
from layerstore.ops.refs import resolve
from layerstore.ops.rooms import Rooms
from layerstore.ops.setup import open_rooms
from layerstore.policy.recipe import ModelOutline, RecipePlan, parse_recipe
from layerstore.storage.files import Files, no_hook
from tests.zero3.compare import full_tensors, raw_bytes
from tests.zero3.launch import Launch
from tests.zero3.scenarios import GROUPINGS, SAVE_STEPS, SCENARIOS

OLD, NEW = SAVE_STEPS


@dataclass(frozen=True)
class History:
    """Both checkpoints of one scenario, in a store and on disk."""

    rooms: Rooms
    run: str
    folders: dict[int, Path]
    """By step: the folder that holds the shards."""

    def outline(self) -> ModelOutline:
        """Return the model."""
        record = resolve(self.rooms, f"{self.run}@{NEW}").record
        return ModelOutline.of(self.rooms.version_of(entry) for entry in record.layers)

    def entry(self, layer: str, reference: str) -> LayerEntry:
        """Return the version of *layer* that *reference* has."""
        record = resolve(self.rooms, reference).record
        return next(entry for entry in record.layers if entry.layer == layer)

    def write(self, plan: RecipePlan, out: Path) -> Path:
        """Write the composite that *plan* means to *out*; return the folder that holds the shards."""
        base = resolve(self.rooms, plan.base.reference(run=self.run))
        layers = [self.entry(name, choice.reference(run=self.run)) for name, choice in plan.layers.items()]
        composition = Composition(base=base.record, commit=base.commit, policy="recipe", layers=tuple(layers))
        execute_compose(self.rooms, composition, out, progress=Silent())
        return out / base.record.layout.tag


def history(trained: Launch, name: str, tmp_path: Path) -> History:
    """Ingest both checkpoints of the scenario *name*."""
    scenario = next(one for one in SCENARIOS if one.name == name)
    with layerstore.init(tmp_path / "store") as store:
        for step in SAVE_STEPS:
            store.ingest(scenario.save_dir(trained.root, step=step), run=name, tag=scenario.tag(step=step))
    folders = {step: scenario.tag_dir(trained.root, step=step) for step in SAVE_STEPS}
    return History(open_rooms(tmp_path / "store", Files(no_hook)), name, folders)


def parity_recipe(outline: ModelOutline, *, tied: bool) -> str:
    """Return LLMTailor's parity recipe: even blocks and the output side new, odd blocks and the input side old."""
    blocks = sum(name.startswith("model.layers.") for name in outline.names)
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


@pytest.mark.parametrize("name", [*(f"grouped_{grouping}" for grouping in GROUPINGS), "tied"])
def test_llmtailors_recipe_gives_the_tensors_that_its_grammar_means(trained: Launch, tmp_path: Path, name: str) -> None:
    """Whatever the order of the optimizer's groups, tied or not: master and moments of each parameter, bit for bit."""
    known = history(trained, name, tmp_path)
    outline = known.outline()
    recipe = parse_recipe(parity_recipe(outline, tied=name == "tied"), name="parity.yaml")
    sources = {step: full_tensors(folder) for step, folder in known.folders.items()}

    found = full_tensors(known.write(recipe.plan(outline), tmp_path / "out"))

    assert found.keys() == sources[NEW].keys()
    for parameter, tensors in found.items():
        expected, other = (sources[step][parameter] for step in (meant(parameter), OLD + NEW - meant(parameter)))
        assert tensors.keys() == expected.keys() >= {"master", "exp_avg", "exp_avg_sq"}
        assert all((raw_bytes(tensors[kind]) == raw_bytes(expected[kind])).all() for kind in tensors), parameter
        assert any((raw_bytes(tensors[kind]) != raw_bytes(other[kind])).any() for kind in tensors), parameter


def test_both_grammars_say_the_same_of_a_real_model(trained: Launch, tmp_path: Path) -> None:
    """Moving over from LLMTailor changes the words, not the layers."""
    outline = history(trained, "grouped_blocks_first", tmp_path).outline()
    ours = f"""
base: {NEW}
layers:
  "model.layers.[odd]": {OLD}
  model.embed_tokens: {OLD}
rest: base
"""

    theirs = parse_recipe(parity_recipe(outline, tied=False), name="theirs.yaml").plan(outline)
    mine = parse_recipe(ours, name="ours.yaml").plan(outline)

    assert theirs.base.step == mine.base.step == NEW
    assert {name: choice.step for name, choice in theirs.layers.items()} == {
        name: NEW if choice.is_base else choice.step for name, choice in mine.layers.items()
    }
