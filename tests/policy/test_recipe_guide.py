"""What the guide to recipes says is so: its examples are planned, and it explains every key."""

import re
from pathlib import Path

import pytest

import layerstore.policy.recipe
from layerstore.policy.recipe import parse_recipe
from tests.policy.recipes import FILE, llama, plan, steps

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
OURS, THEIRS, THEIRS_IN_OUR_WORDS = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_first_example_is_parity_in_our_words() -> None:
    """Even blocks from the base, odd ones and the embedding from an earlier step, the rest from the base."""
    found = plan(OURS, llama(4))

    assert (found.base.run, found.base.step) == ("sft", 1200)
    assert {name for name, step in steps(found).items() if step == 1100} == {
        "model.embed_tokens",
        "model.layers.1",
        "model.layers.3",
    }
    assert sum(choice.is_base for choice in found.layers.values()) == 4


def test_both_grammars_of_the_worked_example_give_one_plan() -> None:
    """The recipe of LLMTailor's and its translation name the same step for every layer and for the base."""
    theirs, ours = plan(THEIRS, llama(4)), plan(THEIRS_IN_OUR_WORDS, llama(4))

    assert theirs.base.step == ours.base.step == 200
    assert steps(theirs) == {name: 200 if choice.is_base else choice.step for name, choice in ours.layers.items()}
    assert theirs.notes == (f"{FILE}:18:1: 'dtype' has no effect on a checkpoint of whole layers",)
    assert ours.notes == ()
    assert parse_recipe(THEIRS, name=FILE).run_hint == "out"


@pytest.mark.parametrize("key", layerstore.policy.recipe.llmtailor.KEYS)
def test_every_key_of_llmtailors_grammar_is_explained(key: str) -> None:
    """No key is understood, or ignored, without the guide saying so."""
    assert f"`{key}`" in GUIDE
