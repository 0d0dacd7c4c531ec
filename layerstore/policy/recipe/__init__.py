"""
Recipes: a YAML file that says which step each layer comes from, in our own grammar or in LLMTailor's.

From text to a checked plan, and nothing beyond: which commits there are is for others to find out,
who name the place of each choice when one is not there (`Spot.located`).
"""

from layerstore.policy.recipe import llmtailor, own
from layerstore.policy.recipe.document import MapNode, read_document, read_text
from layerstore.policy.recipe.llmtailor import read_llmtailor
from layerstore.policy.recipe.own import read_own
from layerstore.policy.recipe.plan import Choice, ModelOutline, OutlineLayer, Recipe, RecipePlan, outline_of
from layerstore.policy.recipe.spots import Spot

__all__ = [
    "Choice",
    "ModelOutline",
    "OutlineLayer",
    "Recipe",
    "RecipePlan",
    "Spot",
    "outline_of",
    "parse_recipe",
    "read_text",
]


def parse_recipe(text: str, *, name: str) -> Recipe:
    """
    Return the recipe that *text* spells; *name* is what errors call the file.

    The keys at the top decide the grammar.

    Raises:
        InvalidInput: It is no recipe; the message begins with file, line and column.
    """
    document = read_document(text, name=name)
    if not isinstance(document, MapNode):
        raise document.spot.error("a recipe is a mapping", hint=_HINT)
    keys = [key for key, _ in document.entries]
    ours = [key for key in keys if key.text in own.KEYS]
    theirs = [key for key in keys if key.text in llmtailor.KEYS]
    if ours and theirs:
        second = max(ours[0], theirs[0], key=lambda key: (key.spot.line, key.spot.column))
        raise second.spot.error(f"{ours[0].text!r} and {theirs[0].text!r} belong to different grammars", hint=_HINT)
    if theirs:
        return read_llmtailor(document, name=name)
    if ours:
        return read_own(document, name=name)
    raise document.spot.error("this is no recipe: no key of one stands at the top", hint=_HINT)


_HINT = "begin with base: and layers:, or with LLMTailor's slices:"
