"""The model that a recipe is planned for, and the plan: plain values without access to the disk."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from layerstore.model import LayerVersion
from layerstore.policy.recipe.document import Spot
from layerstore.policy.recipe.patterns import listed


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """The model that a recipe is for."""

    names: tuple[str, ...]
    """The layers' names, in the model's order."""
    look: Callable[[], Iterable[LayerVersion]]
    """Reads the layers themselves; our own grammar needs only the names."""

    @cached_property
    def layers(self) -> tuple[LayerVersion, ...]:
        """The layers, in the model's order."""
        return tuple(self.look())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one layer, or the base, comes from."""

    run: str | None
    """
    A run or a pin.

    None stands for the base's own run and attempt; for the base itself, the run that the user gives.
    """
    back: int = 0
    """How many attempts before the run's newest attempt."""
    step: int | None
    """None stands for the newest step or, if *run* is None too, for the base's own version of the layer."""
    path: str | None = None
    """The checkpoint's folder, if the recipe gives one: the folder to ingest if the store lacks the step."""
    spot: Spot
    """The position of the choice in the recipe."""

    @property
    def is_base(self) -> bool:
        """Whether the layer is the base's own."""
        return self.run is None and self.step is None

    def reference(self, *, run: str, back: int = 0) -> str:
        """
        Return the choice as a reference; *run* and *back*, those of the base, are used if the recipe gives no run.

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
    """Supplies everything that is not a layer: config, tokenizer, scheduler, counters."""
    layers: Mapping[str, Choice]
    """Where each layer comes from, in the model's order."""
    notes: tuple[str, ...]
    """Notes for the user: settings without effect on a composite, and defaults that were used."""


def notes_of_later_layers(base: Choice, layers: Mapping[str, Choice]) -> list[str]:
    """Return a note if any of *layers* come from later steps of the attempt of *base*."""
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
        f"{first.spot}: newer than the base, step {base.step}: {listed(later)}; "
        "counters and scheduler are older than these layers"
    ]
