"""
Our own grammar: ``base``, ``layers`` and ``rest``.

Every layer fits exactly one entry: two entries that fit one layer are an error, and so is a layer that no entry fits,
unless ``rest`` says where such layers come from. So the order of entries does not matter.
"""

import re
from dataclasses import dataclass

from layerstore.layers import parse_reference
from layerstore.policy.recipe.document import MapNode, Node, Spot, as_integer, as_map, as_scalar, required
from layerstore.policy.recipe.patterns import Pattern, listed, read_pattern
from layerstore.policy.recipe.plan import Choice, ModelOutline, RecipePlan, notes_of_later_layers

KEYS = ("base", "layers", "rest")
_BASE = "base"
_STEP = re.compile(r"@(?P<step>[0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRecipe:
    """A recipe in our own grammar, not yet matched with a model."""

    name: str
    """The file's name in errors."""
    base: Choice
    entries: tuple[tuple[Pattern, Choice], ...]
    rest: Choice | None
    """Where layers that no entry fits come from; None if such layers are an error."""
    spot: Spot
    """The position of ``layers``."""
    grammar: str = "layerstore"
    run_hint: str | None = None

    def plan(self, model: ModelOutline) -> RecipePlan:
        """
        Return which version every layer of *model* comes from.

        Raises:
            InvalidInput: The recipe does not fit the model.
        """
        chosen_by: dict[str, tuple[Pattern, Choice]] = {}
        for pattern, choice in self.entries:
            fitting = pattern.layers(model.names)
            _check_not_doubled(pattern, {name: chosen_by[name][0] for name in fitting if name in chosen_by})
            chosen_by |= dict.fromkeys(fitting, (pattern, choice))
        layers = {name: chosen_by[name][1] if name in chosen_by else self.rest for name in model.names}
        chosen = {name: choice for name, choice in layers.items() if choice is not None}
        if len(chosen) < len(layers):
            raise self.spot.error(
                f"no entry fits {listed(name for name in layers if name not in chosen)}",
                hint="add entries, or a line 'rest: base' for all that is left",
            )
        return RecipePlan(base=self.base, layers=chosen, notes=tuple(notes_of_later_layers(self.base, chosen)))


def _check_not_doubled(pattern: Pattern, before: dict[str, Pattern]) -> None:
    if before:
        first = next(iter(before.values()))
        raise pattern.spot.error(
            f"{listed(before)}: {pattern.text!r} overlaps {first.text!r} in line {first.spot.line}",
            hint="let only one entry fit each layer; 'rest:' covers the remaining layers",
        )


def read_own(document: MapNode, *, name: str) -> OwnRecipe:
    """Read the recipe *document*; *name* is the file's name in errors."""
    as_map(document, what="the recipe", keys=KEYS)
    base = _choice(required(document, "base", what="the recipe"), what="base")
    if base.is_base:
        raise base.spot.error("the base cannot be 'base'", hint="name a commit: 1200, RUN@1200, RUN or a pin")
    layers, rest = document.get("layers"), document.get("rest")
    if layers is None and rest is None:
        raise document.key_spot("layers").error("the recipe names no layers", hint="add layers:, or 'rest: base'")
    return OwnRecipe(
        name=name,
        base=base,
        entries=() if layers is None else _entries(layers),
        rest=None if rest is None else _choice(rest, what="rest"),
        spot=document.key_spot("layers"),
    )


def _entries(layers: Node) -> tuple[tuple[Pattern, Choice], ...]:
    if not isinstance(layers, MapNode):
        raise layers.spot.error(
            "layers is not a mapping from names to steps", hint="write each as: model.layers.[0-3]: 1100"
        )
    return tuple((read_pattern(key), _choice(value, what=repr(key.text))) for key, value in layers.entries)


def _choice(node: Node, *, what: str) -> Choice:
    value = as_scalar(node, what=what)
    if value.text == _BASE:
        return Choice(run=None, step=None, spot=value.spot)
    if value.text.isdecimal():
        return Choice(run=None, step=as_integer(value, what=what), spot=value.spot)
    if match := _STEP.fullmatch(value.text):
        return Choice(run=None, step=int(match["step"]), spot=value.spot)
    with value.spot.located():
        reference = parse_reference(value.text)
    return Choice(run=reference.name, back=reference.back, step=reference.step, spot=value.spot)
