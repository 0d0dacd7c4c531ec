"""How old the layers of a composite are, seen from its base."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from layerstore.errors import Conflict
from layerstore.model import CommitRecord, LayerEntry

NEVER_EXISTED = "this model never existed during training (docs/evidence.md says what that costs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAge:
    """How much older than the base a layer is."""

    layer: str
    run: str
    attempt: int
    step: int
    """The step that saved it."""
    steps: int | None
    """Steps before the base; negative if newer, None if from another run."""
    saves: int | None
    """Saves before the base; None also if saves and steps are in different orders."""
    optimizer_step: int | None
    """The optimizer's update count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How old the layers of a composite are."""

    layers: tuple[LayerAge, ...]
    """In the model's order."""

    @classmethod
    def of(cls, base: CommitRecord, layers: Sequence[LayerEntry]) -> Self:
        """Return the ages of *layers* relative to *base*."""
        return cls(layers=tuple(_age(base, entry) for entry in layers))

    def __repr__(self) -> str:
        oldest, ages = self.oldest, Counter(layer.step for layer in self.layers)
        steps = ", ".join(f"{count} of step {step}" for step, count in ages.items())
        return f"<Staleness: {len(self.layers)} layers, {steps}; oldest {oldest.layer}>"

    @property
    def oldest(self) -> LayerAge:
        """The trained layer that is most steps behind the base; an unknown age counts as the oldest."""
        return max(self.trained, key=lambda age: float("inf") if age.steps is None else age.steps)

    @property
    def optimizer_steps(self) -> dict[int, int]:
        """The optimizer's update counts, with the number of layers that have each."""
        counts = Counter(age.optimizer_step for age in self.layers if age.optimizer_step is not None)
        return dict(sorted(counts.items()))

    @property
    def trained(self) -> tuple[LayerAge, ...]:
        """The layers that the optimizer updates: the others are the same at every save."""
        return tuple(age for age in self.layers if age.optimizer_step is not None) or self.layers

    @property
    def is_mixed(self) -> bool:
        """Whether trained layers of several saves are mixed."""
        return len({(age.run, age.attempt, age.step) for age in self.trained}) > 1

    def check(self, base: CommitRecord, *, steps_max: int) -> None:
        """Raise Conflict if a layer is more than *steps_max* steps older than *base*, or its age is unknown."""
        oldest = self.oldest
        if oldest.steps is not None and oldest.steps <= steps_max:
            return
        if oldest.steps is None:
            found = f"is from {oldest.run}@{oldest.step}, another run, so that its age is not known"
        else:
            found = f"is from step {oldest.step}, {_steps(oldest.steps)} before"
        raise Conflict(
            f"{oldest.layer} {found} {base.run}@{base.step}; layers may be at most {_steps(steps_max)} old",
            hint="allow more, or compose another step; --dry-run without --max-staleness shows every layer's age",
        )


def mixture_of(base: CommitRecord, layers: Sequence[LayerEntry]) -> str | None:
    """Say that no training ever had this model, if *layers* are from several saves; None if they are from one."""
    found = others_in(base, layers)
    if found is None:
        return None
    count, are_older = found
    are = "is" if count == 1 else "are"
    return (
        f"{count} of {len(layers)} layers {are} {'older than' if are_older else 'not from'} step {base.step}: "
        f"{NEVER_EXISTED}"
    )


def others_in(base: CommitRecord, layers: Sequence[LayerEntry]) -> tuple[int, bool] | None:
    """Count the *layers* of a mixture that are not from *base*, and say whether all are older; None if it is none."""
    staleness = Staleness.of(base, layers)
    if not staleness.is_mixed:
        return None
    own = base.run, base.attempt, base.step
    others = [age for age in staleness.trained if (age.run, age.attempt, age.step) != own]
    return len(others), all(age.steps is not None and age.steps > 0 for age in others)


def _age(base: CommitRecord, entry: LayerEntry) -> LayerAge:
    origin = entry.origin
    is_own = origin.run == base.run
    steps = base.step - origin.step
    saves = base.save_number - origin.save_number
    return LayerAge(
        layer=entry.layer,
        run=origin.run,
        attempt=origin.attempt,
        step=origin.step,
        steps=steps if is_own else None,
        # A step that was filled in later has a number that says nothing about its age.
        saves=saves if is_own and _sign(saves) == _sign(steps) else None,
        optimizer_step=entry.optimizer_step,
    )


def _sign(count: int) -> int:
    return (count > 0) - (count < 0)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
