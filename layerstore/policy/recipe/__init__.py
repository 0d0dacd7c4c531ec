"""
Recipes: YAML files that determine which step each layer comes from, in our own grammar or in LLMTailor's.

This package turns text into a checked plan. The caller finds out which commits exist, and `Spot.located` makes the
caller's errors begin with the position in the recipe.
"""

from layerstore.policy.recipe import llmtailor, own
from layerstore.policy.recipe.document import MapNode, Spot, read_document, read_text
from layerstore.policy.recipe.llmtailor import read_llmtailor
from layerstore.policy.recipe.llmtailor_plan import LLMTailorRecipe
from layerstore.policy.recipe.own import OwnRecipe, read_own
from layerstore.policy.recipe.patterns import pattern_of
from layerstore.policy.recipe.plan import Choice, ModelOutline, RecipePlan

Recipe = OwnRecipe | LLMTailorRecipe

_HINT = "begin with base: and layers:, or with LLMTailor's slices:"


def parse_recipe(text: str, *, name: str) -> Recipe:
    """
    Parse the recipe *text* in the grammar of its top-level keys; *name* is the file's name in errors.

    Raises:
        InvalidInput: *text* is not a recipe; the message begins with file, line and column.
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
    raise document.spot.error("this is not a recipe: it has none of a recipe's top-level keys", hint=_HINT)
