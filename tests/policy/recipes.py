"""What tests of recipes share: outlines of models, and errors whose place is marked in the recipe itself."""

import textwrap
from collections.abc import Iterable

import pytest

from layerstore.errors import InvalidInput
from layerstore.model import LayerVersion, Parameter
from layerstore.policy.recipe import ModelOutline, RecipePlan, parse_recipe

FILE = "recipe.yaml"
# Stands in front of what an error is expected to name; removed before the recipe is read.
MARK = "«"


def layer(name: str, *, ties: Iterable[str] = (), frozen: bool = False, parameters: Iterable[str] = ()) -> LayerVersion:
    """Return a layer of one weight, or of *parameters*."""
    names = tuple(parameters) or (f"{name}.weight",)
    return version(name, *(parameter(each, *ties, frozen=frozen) for each in names))


def version(name: str, *parameters: Parameter) -> LayerVersion:
    """Return a layer with nothing but *parameters*."""
    return LayerVersion(layer=name, parameters=parameters, buffers=(), world_size=2, objects=())


def parameter(name: str, *aliases: str, frozen: bool = False) -> Parameter:
    """Return a parameter."""
    return Parameter(name=name, dtype="BF16", shape=(2, 2), frozen=frozen, aliases=aliases)


def model(*layers: LayerVersion) -> ModelOutline:
    """Return a model of *layers*."""
    return ModelOutline(names=tuple(layer.layer for layer in layers), look=lambda: layers)


def blocks(count: int, *, stack: str = "model.layers") -> list[LayerVersion]:
    """Return a stack of blocks."""
    return [layer(f"{stack}.{index}") for index in range(count)]


def llama(count: int = 4, *, tied: bool = False) -> ModelOutline:
    """Return a model as Llama and its kin name their layers."""
    if tied:
        embedding = layer("model.embed_tokens", ties=["lm_head.weight"])
        return model(embedding, *blocks(count), layer("model.norm"))
    return model(layer("model.embed_tokens"), *blocks(count), layer("model.norm"), layer("lm_head"))


def plan(text: str, outline: ModelOutline) -> RecipePlan:
    """Return the plan of the recipe *text* for *outline*."""
    return parse_recipe(textwrap.dedent(text), name=FILE).plan(outline)


def steps(found: RecipePlan) -> dict[str, int | None]:
    """Return each layer's step; None for what the base has."""
    return {name: choice.step for name, choice in found.layers.items()}


def refused(text: str, outline: ModelOutline | None = None, *, match: str) -> InvalidInput:
    """Check that the recipe is refused where the mark stands, with a message that *match* is in and a hint."""
    dedented = textwrap.dedent(text)
    before, mark, after = dedented.partition(MARK)
    assert mark, "the test marks the place"
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")

    with pytest.raises(InvalidInput) as caught:
        parse_recipe(before + after, name=FILE).plan(outline or llama())

    assert str(caught.value).startswith(f"{FILE}:{line}:{column}: "), str(caught.value)
    assert match in str(caught.value)
    assert caught.value.hint
    assert (caught.value.exit_code, "\n" in str(caught.value)) == (2, False)
    return caught.value
