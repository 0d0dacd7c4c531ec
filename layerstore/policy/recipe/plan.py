"""What a recipe is planned against, and what comes out: values without any way to the disk."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from layerstore.layers import layer_of
from layerstore.model import LayerVersion
from layerstore.policy.recipe.names import listed
from layerstore.policy.recipe.spots import Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlineLayer:
    """What a recipe has to know of one layer."""

    name: str
    parameters: tuple[str, ...]
    ties: tuple[str, ...]
    """Names under which other layers use its parameters: a tied ``lm_head.weight``."""
    frozen: bool
    """Whether nothing in it is trained."""
    dtypes: frozenset[str]
    """Codes of the element types of its weights."""


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """The model that a recipe is for."""

    names: tuple[str, ...]
    """The layers' names, in the model's order."""
    look: Callable[[], Iterable[OutlineLayer]]
    """Returns what they are: our own grammar goes by names alone, and need not wait for that."""

    @cached_property
    def layers(self) -> tuple[OutlineLayer, ...]:
        """All that is known of them, in their order."""
        return tuple(self.look())


def outline_of(version: LayerVersion) -> OutlineLayer:
    """Return what a recipe has to know of the layer *version*."""
    parameters = version.parameters
    return OutlineLayer(
        name=version.layer,
        parameters=tuple(parameter.name for parameter in parameters),
        # Compared by rule, not with the layer's name: a pattern of the user's may have given that.
        ties=tuple(
            alias
            for parameter in parameters
            for alias in parameter.aliases
            if layer_of(alias) != layer_of(parameter.name)
        ),
        frozen=all(parameter.frozen for parameter in parameters),
        dtypes=frozenset(parameter.dtype for parameter in parameters),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one layer, or the base, comes from."""

    run: str | None
    """
    A run, or a pin.

    None means the base's own run and attempt; in the choice of the base itself, whatever run the user names.
    """
    back: int = 0
    """How many attempts before the run's newest."""
    step: int | None
    """None means the newest; with no run either, the base's own version of the layer."""
    path: str | None = None
    """The checkpoint's folder, where the recipe names one: what to ingest if the store lacks the step."""
    spot: Spot
    """Where the recipe says so."""

    @property
    def is_base(self) -> bool:
        """Whether the base supplies the layer as it has it."""
        return self.run is None and self.step is None

    def reference(self, *, run: str, back: int = 0) -> str:
        """
        Return the choice as a reference; *run* and *back* are the base's, in place of what is left open.

        >>> spot = Spot(file="r.yaml", line=3, column=5)
        >>> Choice(run=None, step=1100, spot=spot).reference(run="sft", back=1)
        'sft~1@1100'
        >>> Choice(run="best", step=None, spot=spot).reference(run="sft")
        'best'
        """
        name, attempt = (run, back) if self.run is None else (self.run, self.back)
        return name + (f"~{attempt}" if attempt else "") + ("" if self.step is None else f"@{self.step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """A recipe that fits its model: one choice for every layer."""

    base: Choice
    """Supplies all that is not a layer: config, tokenizer, scheduler, counters."""
    layers: Mapping[str, Choice]
    """In the model's order."""
    notes: tuple[str, ...]
    """What the user should know: what the recipe says and has no meaning here, what it leaves to a default."""


class Recipe(Protocol):
    """A recipe that was understood, but not yet held against a model."""

    @property
    def name(self) -> str:
        """What errors call the file."""

    @property
    def grammar(self) -> str:
        """``layerstore`` or ``llmtailor``."""

    @property
    def base(self) -> Choice:
        """Supplies all that is not a layer, and the model to plan against."""

    @property
    def run_hint(self) -> str | None:
        """What ``ingest`` would have called the run that the recipe speaks of; None where it says nothing of it."""

    def plan(self, model: ModelOutline) -> RecipePlan:
        """
        Return which version every layer of *model* comes from.

        Raises:
            InvalidInput: The recipe does not fit the model; the message begins with file, line and column.
        """


def notes_of_later_layers(base: Choice, layers: Mapping[str, Choice]) -> list[str]:
    """Return a note if *layers* come from steps of the base's own attempt that lie after it."""
    later = {
        name: choice
        for name, choice in layers.items()
        if (choice.run is None or (choice.run, choice.back) == (base.run, base.back))
        and choice.step is not None
        and base.step is not None
        and choice.step > base.step
    }
    if not later:
        return []
    first = min(later.values(), key=lambda choice: (choice.spot.line, choice.spot.column))
    return [
        f"{first.spot}: from after the base, step {base.step}: {listed(later)}; "
        "counters and scheduler are older than these layers"
    ]
