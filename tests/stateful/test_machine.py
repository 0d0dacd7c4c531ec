"""Runs of the state machine: a sample in a usual run, thousands of steps in an exhaustive one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from layerstore.ingest import transfer
from tests.faults.conftest import fast_module_path
from tests.faults.harness import seeded
from tests.stateful.lab import Lab
from tests.stateful.machine import StoreMachine

__all__ = ["fast_module_path"]

# A harmed index is made anew, with a notice each time.
pytestmark = pytest.mark.filterwarnings("ignore::layerstore.storage.IndexNotice")


@pytest.fixture
def lab(fast_module_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Return where machines work, one thread each: so a crash is at the same call every time."""
    monkeypatch.setattr(transfer, "WORKERS_MAX", 1)
    made = Lab(fast_module_path)
    monkeypatch.setattr(StoreMachine, "lab", made, raising=False)
    yield made
    for folder in made.folder.iterdir():
        assert folder.name in {"sources", "foreign"} or folder.name.startswith("machine")


@pytest.mark.fault(35, 41, 45, 92, 101)
@pytest.mark.parametrize(
    ("histories", "steps"),
    [
        (2, 20),
        pytest.param(6, 30, marks=pytest.mark.full),
        pytest.param(150, 50, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
    ],
)
def test_histories_are_what_the_model_says(lab: Lab, histories: int, steps: int) -> None:
    """Some dozens of steps, or thousands; those of another seed are others."""
    number = seeded("histories").randrange(10**9)
    started = time.monotonic()
    run_state_machine_as_test(
        seed(number)(StoreMachine),
        settings=settings(
            max_examples=histories,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # a failure is told with all its steps: to shorten them would take minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    counts = ", ".join(f"{count} {what}" for what, count in sorted(lab.counts.items()))
    print(f"{histories} histories: {counts} in {time.monotonic() - started:.0f} s")
    assert lab.counts["steps"] > histories * 2
