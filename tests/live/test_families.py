"""
Models that people train, under each optimizer: saved by parity, composed, resumed to the last bit, exported, loaded.

What the ranks compare with is gathered by DeepSpeed itself, parameter by parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

import layerstore
from layerstore.layers import layer_of
from layerstore.store import Store
from tests.deepspeed.launch import printed
from tests.forked import Event, Nursery
from tests.live.family_cases import CASES, OPTIMIZERS, SAVES, STEPS, Case

pytestmark = pytest.mark.timeout(400)

sampled = pytest.mark.sample(1, always=("mixtral-torch-AdamW", "qwen3-Muon"), by="case")
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What is known of a case."""

    events: list[Event]
    """What its ranks have told of its states."""
    loaded: dict[str, Any]
    """What Transformers makes of an export of its mixture."""


TrainedOf = Callable[[Case], Trained]


@pytest.fixture(scope="module")
def trained_of(request: pytest.FixtureRequest, ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> TrainedOf:
    """Return what trains a case: with all of its family that tests ask for, in one launch."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asked = [cast("Case", item.callspec.params["case"]) for item in functions if item.path == Path(__file__)]

    @cache
    def family(name: str) -> dict[Case, Trained]:
        folder, cases = tmp_path_factory.mktemp(name), [case for case in dict.fromkeys(asked) if case.family == name]
        layerstore.init(folder / "store").close()
        options = {"out": str(folder), "cases": [(case.family, case.optimizer) for case in cases]}
        with ranks.launch("tests.live.families:run", options, folder=folder, name="run") as launch:
            events = launch.done().events("state")
        exports = {case: folder / f"{case.name}-export" for case in cases}
        with Store(folder / "store") as store:
            for case, export in exports.items():
                store.compose(f"{case.name}@{SAVES}", policy="parity").export(export)
        loaded = printed("pretrained", exports.values())
        return {
            case: Trained(events=[of for of in events if of["name"] == case.name], loaded=loaded[str(export)])
            for case, export in exports.items()
        }

    return lambda case: family(case.family)[case]


def losses(events: list[Event], way: str) -> dict[tuple[int, int], str]:
    """Return the losses of the training that went on in this *way*, by step and rank."""
    return {(of["step"], of["rank"]): of["loss"] for of in events if of["way"] == way and "loss" in of}


def state(events: list[Event], way: str, step: int) -> dict[str, dict[str, str]]:
    """Return the digests at *step*, by parameter."""
    [found] = [of for of in events if (of["way"], of["step"], of["rank"]) == (way, step, 0)]
    return dict(found["digests"])


@sampled
@each
def test_a_resume_is_the_training_that_was_not_interrupted(case: Case, trained_of: TrainedOf) -> None:
    """Every loss of every rank, and at the end every master and moment."""
    events = trained_of(case).events

    undisturbed = losses(events, "trained")

    assert len(undisturbed) == STEPS * 2
    assert len({undisturbed[step, 0] for step in range(1, STEPS + 1)}) > 1  # in bf16 two may be equal by chance
    assert losses(events, "resumed") == {key: loss for key, loss in undisturbed.items() if key[0] > 1}
    assert state(events, "resumed", STEPS) == state(events, "trained", STEPS)


@sampled
@each
def test_a_mixture_has_every_layer_as_it_was_saved(case: Case, trained_of: TrainedOf) -> None:
    """Whether it is filled into the engine or loaded by DeepSpeed from shards; training goes on alike."""
    events = trained_of(case).events
    steps = next(of["layers"] for of in events if of["way"] == "mixed" and "layers" in of)

    mixed, loaded = state(events, "mixed", SAVES), state(events, "loaded", SAVES)

    expected = {name: state(events, "trained", steps[layer_of(name)])[name] for name in mixed}
    assert {SAVES - 1, SAVES} == set(steps.values())
    assert mixed == expected
    assert loaded == expected
    assert losses(events, "mixed") == losses(events, "loaded")
    assert len(losses(events, "mixed")) == (STEPS - SAVES) * 2
    assert state(events, "mixed", STEPS) == state(events, "loaded", STEPS)


@sampled
@each
def test_the_moments_that_it_keeps_are_those_of_the_page(case: Case, trained_of: TrainedOf) -> None:
    """The page has them of what was declared."""
    events = trained_of(case).events

    kept = {kind for of in state(events, "trained", 1).values() for kind in of} - {"master", "weight"}

    assert kept == set(OPTIMIZERS[case.optimizer])


@sampled
@each
def test_an_export_of_a_mixture_loads_in_transformers(case: Case, trained_of: TrainedOf) -> None:
    """No key is missing or unknown, and every weight follows from the master of its layer."""
    trained = trained_of(case)

    weights = {name: of["weight"] for name, of in state(trained.events, "mixed", SAVES).items()}
    assert trained.loaded["complaints"] == {}
    assert {name: trained.loaded["tensors"][name] for name in weights} == weights
