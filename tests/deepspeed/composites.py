"""Send every trained checkpoint through a store, and keep what came out.

One scenario that fails must not hide the others: its error is kept, and raised by the tests that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import layerstore
from tests.deepspeed.scenarios import (
    HUGGING_FACE_SCENARIOS,
    RESUME_STEP,
    SAVE_STEPS,
    SCENARIOS,
    HuggingFaceScenario,
    Scenario,
)


@dataclass(slots=True)
class Composites:
    """Composites of all scenarios at the step to resume from, laid out like the launch they came from."""

    root: Path
    """Folder that takes the place of a launch's ``--out``."""

    errors: dict[str, Exception] = field(default_factory=dict)
    """By scenario: why there is no composite."""

    names: list[str] = field(default_factory=list)
    """Scenarios that have one, in order."""

    def need(self, name: str) -> None:
        """Raise what kept scenario *name* from being composed, if anything did."""
        if name in self.errors:
            raise self.errors[name]

    def some_names(self) -> list[str]:
        """Return the names of all composites; raise an error if there is not one."""
        for error in self.errors.values() if not self.names else ():
            raise error
        return self.names

    def attempt(self, name: str, round_trip: Callable[[], None]) -> None:
        """Do one scenario's *round_trip* and note how it ended."""
        try:
            round_trip()
        except Exception as error:  # noqa: BLE001 - raised again by every test of this scenario
            self.errors[name] = error
        else:
            self.names.append(name)


def compose_scenarios(trained: Path, store: layerstore.Store, target: Path) -> Composites:
    """Ingest what ``training.py`` left in *trained* into *store*, and compose each scenario into *target*."""
    composites = Composites(target)
    for scenario in SCENARIOS:
        composites.attempt(scenario.name, partial(round_trip, scenario, trained, store, target))
    return composites


def compose_hugging_face(trained: Path, store: layerstore.Store, target: Path) -> Composites:
    """Do the same with what ``trainer.py`` left."""
    composites = Composites(target)
    for scenario in HUGGING_FACE_SCENARIOS:
        composites.attempt(scenario.name, partial(round_trip_hugging_face, scenario, trained, store, target))
    return composites


def round_trip(scenario: Scenario, trained: Path, store: layerstore.Store, target: Path) -> None:
    """Ingest both checkpoints of *scenario* and compose the first."""
    for step in SAVE_STEPS:
        folder = scenario.save_dir(trained, step=step)
        commit = store.ingest(folder, run=scenario.name, tag=scenario.tag(step=step))
        assert step == commit.step
    write_composite(store, scenario.name, scenario.save_dir(target, step=RESUME_STEP))


def round_trip_hugging_face(
    scenario: HuggingFaceScenario, trained: Path, store: layerstore.Store, target: Path
) -> None:
    """Ingest both checkpoints of *scenario*, which find their tag by themselves, and compose the first."""
    for step in SAVE_STEPS:
        commit = store.ingest(scenario.checkpoint(trained, step=step), run=scenario.name)
        assert step == commit.step
    write_composite(store, scenario.name, scenario.checkpoint(target, step=RESUME_STEP))


def mix_scenarios(trained: Path, store: layerstore.Store, target: Path) -> Composites:
    """Ingest what ``training.py`` left, and compose each scenario's last save under every policy."""
    composites = Composites(target)
    for scenario in SCENARIOS:
        composites.attempt(scenario.name, partial(mix, scenario, trained, store, target))
    return composites


def mix(scenario: Scenario, trained: Path, store: layerstore.Store, target: Path) -> None:
    """Ingest both checkpoints of *scenario* and compose them into one under every policy."""
    for step in SAVE_STEPS:
        store.ingest(scenario.save_dir(trained, step=step), run=scenario.name, tag=scenario.tag(step=step))
    for policy, chosen in MIXED.items():
        out = scenario.save_dir(target / policy, step=SAVE_STEPS[-1])
        out.parent.mkdir(parents=True, exist_ok=True)
        store.compose(scenario.name, policy=chosen).write(out)


MIXED: dict[str, layerstore.Parity | layerstore.Filter] = {
    "parity": layerstore.Parity(),
    "filter": layerstore.Filter(first=1, last=0),
}
"""By the names in ``POLICIES``; of two saves the second is no turn of the filter, so that the rest is of the first."""


def write_composite(store: layerstore.Store, run: str, out: Path) -> None:
    """Write *run*'s checkpoint of the step to resume from into the new folder *out*."""
    out.parent.mkdir(parents=True, exist_ok=True)
    store.compose(f"{run}@{RESUME_STEP}", policy="exact").write(out)
