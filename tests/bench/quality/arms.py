"""
The ways to save that are compared, and what each gives a job that failed.

Selections keep some of the layers, and compact saves keep all of them, but less finely. Ways that layerstore does not
offer are made at the resume, of what it does.

An engine has one saver at a time, and a saver's first save is full. So DeepSpeed writes a checkpoint at each
opportunity, once, and it is ingested into a store for every arm under its policy: the policy decides as it does in a
saver, from the same masters. All arms see the same trunk to the last bit, and a trunk is trained once.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from layerstore.policy import Drift, Filter, Parity, Policy, Save
from layerstore.precision import PRECISIONS, PrecisionName
from layerstore.tree import Tree
from tests.bench.published import DEEPSPEED_BYTES
from tests.bench.quality.coded import WAYS, Way
from tests.bench.quality.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to save, and to go on."""

    name: str
    store: str
    """The arm whose store it resumes from."""
    policy: Callable[[int], Policy | str] | None = None
    """For a model of so many parameters; None if another arm's store is used."""
    way: Way | None = None
    """How finely it keeps what it saves; None for exact saves."""
    is_averaged: bool = False
    reads_other_batches: bool = False
    resumes_often: bool = False
    """Whether it is resumed again and again, in a training of its own."""

    @property
    def precision(self) -> PrecisionName:
        """The precision in which its store keeps what it saves."""
        return "exact" if self.way is None else cast("PrecisionName", self.way.precision.name)

    @property
    def is_made_at_resume(self) -> bool:
        """Whether layerstore cannot keep it like this: its state is made of that of another arm's store."""
        return self.way is not None and self.way.name not in PRECISIONS

    def failures(self, settings: Settings) -> tuple[int, ...]:
        """Return the steps after which it is resumed, or the last one if it was resumed all along."""
        return (settings.steps,) if self.resumes_often else settings.failures


class FullMeasured:
    """Everything at every save; its records say how far each layer has moved since the save before."""

    name = "full-measured"
    parameters: ClassVar[dict[Tree, Tree]] = {}
    measures = True

    def due(self, save: Save) -> Collection[str]:
        """Return all layers."""
        return save.layers


class DriftByBudget:
    """
    Drift without turns: worst first, as the budget allows.

    In drift itself each layer's turn comes once in ``stalest`` saves, the first layer's first: so all turns come within
    the first saves of a run, and in a run of 80 saves they alone take one part in 80 of its bytes.
    """

    name = "drift-by-budget"
    measures = True
    _NEVER = 10**9

    def __init__(self, budget: int) -> None:
        self._drift = Drift(threshold=0.0, budget=budget, stalest=self._NEVER)

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """Its settings."""
        return self._drift.parameters

    def due(self, save: Save) -> Collection[str]:
        """Return what drift takes at a save that is nobody's turn."""
        return self._drift.due(replace(save, number=self._NEVER // 2))


FULL, NOISE, RARE, SELDOM = "full", "full, other batches", "full, rarely", "full, seldom"
EXACT_EVERY = 10
NOT_TRAINED = (RARE, SELDOM)
"""They lose steps and nothing else, so the trunk stands for them."""


def taken_once_in(settings: Settings, name: str) -> int:
    """Return how many opportunities one save of an arm of `NOT_TRAINED` is for."""
    return {RARE: settings.fewer, SELDOM: settings.seldom}[name]


def arms(settings: Settings) -> tuple[Arm, ...]:
    """Return all arms that are trained; those of `NOT_TRAINED` need none, see `job`."""

    def drift(parameters: int) -> Policy:
        budget = parameters * DEEPSPEED_BYTES // settings.few - settings.state_bytes
        # Half of the budget is for turns, the rest for what moved most, however little that is.
        return Drift(threshold=0.0, budget=budget, stalest=2 * settings.few)

    def drift_by_budget(parameters: int) -> Policy:
        return DriftByBudget(max(parameters * DEEPSPEED_BYTES // settings.fewer - settings.state_bytes, 1))

    few, fewer = f"drift, 1/{settings.few}", f"drift, 1/{settings.fewer}"
    return (
        Arm(name=FULL, store=FULL, policy=lambda _: FullMeasured()),
        Arm(name="parity", store="parity", policy=lambda _: Parity()),
        Arm(name="filter", store="filter", policy=lambda _: Filter()),
        Arm(name="drift", store="drift", policy=lambda _: Drift()),
        Arm(name=few, store="drift-few", policy=drift),
        Arm(name=fewer, store="drift-fewer", policy=drift_by_budget),
        Arm(name=f"average of {settings.averaged}", store=FULL, is_averaged=True),
        Arm(name=NOISE, store=FULL, reads_other_batches=True),
        *_compact(settings),
    )


def _compact(settings: Settings) -> Iterator[Arm]:
    """Yield the arms that keep every layer, less finely."""
    for name in ("moments8", "delta8", "delta4"):
        yield Arm(name=name, store=name, policy=lambda _: "full", way=WAYS[name])
    yield Arm(name="parity, delta8", store="parity-delta8", policy=lambda _: Parity(), way=WAYS["delta8"])
    for name, store in (
        ("bf16 masters, moments8", "moments8"),
        ("moments dropped", "moments8"),
        ("delta4, v factored", "delta4"),
    ):
        yield Arm(name=name, store=store, way=WAYS[name])
    for name in ("delta8", "delta4"):
        often = f"{name}, {settings.steps // settings.resume_every} resumes"
        yield Arm(name=often, store=f"often-{name}", way=WAYS[name], resumes_often=True)
