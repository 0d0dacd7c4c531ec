"""What is trained and saved while it trains, as plain data: one case for each way in which an engine can be built.

Imports neither torch nor deepspeed: pytest reads it while collecting, the launched programs while training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerstore.live.saver.settings import Mode
from layerstore.policy import Filter, Latest, Parity, Policy, Save
from layerstore.tree import Tree
from tests.deepspeed.scenarios import SCENARIO_OF, Scenario

Misuse = Literal["", "refused", "given_up"]

EXAMPLES_FOLDER = Path(__file__).parents[2] / "docs" / "examples"
EXAMPLES = ("with_deepspeed", "with_slurm", "with_trainer", "with_accelerate")


class OneByOne:
    """A user's own policy: one layer after another, and the first one always."""

    name = "one-by-one"

    @property
    def parameters(self) -> dict[Tree, Tree]:
        """There are none."""
        return {}

    def due(self, save: Save) -> Collection[str]:
        """Return the first layer and the next one."""
        return {save.layers[0], save.layers[save.number % len(save.layers)]}


POLICIES: dict[str, Policy] = {
    "latest": Latest(),
    "parity": Parity(),
    "filter": Filter(first=1, last=1, every=2),
    "own": OneByOne(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One engine, and the saver that is attached to it."""

    scenario: Scenario
    """What is built."""

    steps: tuple[int, ...] = (1, 2, 3)
    """Steps after which it is saved; 0 is before the first."""

    policy: str = "latest"
    """The saver's, one of `POLICIES`."""

    mode: Mode = "async"
    """Given to ``attach``."""

    misuse: Misuse = ""
    """What is done wrong meanwhile."""

    @property
    def name(self) -> str:
        """Folder below the launch's output, and the run's name."""
        return self.scenario.name

    @property
    def accumulated(self) -> int:
        """How many batches make one update."""
        found = self.scenario.config.get("gradient_accumulation_steps", 1)
        assert isinstance(found, int)
        return found

    def folder(self, root: Path) -> Path:
        """Return where DeepSpeed's own checkpoints are."""
        return root / "checkpoints" / self.name

    def facts(self, root: Path, rank: int) -> Path:
        """Return where *rank* leaves what it has seen."""
        return root / f"{self.name}.{rank}.json"


CPU_ADAM = "cpu_adam"
FUSED_ADAM = "configured"
OVERFLOW = "overflow"
FROZEN = "frozen"
EXCLUDED = "frozen_excluded"
ACCUMULATED = "accumulated"
BEFORE_FIRST = "before_first"
RANK_BUFFERS = "rank_buffers"
GIVEN_UP = "given_up"

# What is special to saving, with some of the scenarios; tests/live/test_resume.py saves and resumes all of them.
CASES: tuple[Case, ...] = (
    Case(scenario=SCENARIO_OF["tied"], mode="sync"),
    Case(scenario=SCENARIO_OF[FROZEN]),
    Case(scenario=SCENARIO_OF[EXCLUDED]),
    Case(scenario=SCENARIO_OF["client_tensors"]),
    Case(scenario=SCENARIO_OF[FUSED_ADAM]),
    Case(scenario=SCENARIO_OF["partitioned_late"]),
    Case(
        scenario=Scenario(
            name=OVERFLOW,
            why="the first updates are skipped: no moments yet, then moments",
            model="odd",
            precision="fp16",
            config={"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}},
        ),
        steps=(1, 2, 3, 4, 5, 6),
    ),
    Case(
        scenario=Scenario(
            name=CPU_ADAM,
            why="DeepSpeedCPUAdam, which updates in C++",
            model="odd",
            optimizer="configured",
            zero={"offload_optimizer": {"device": "cpu"}},
            config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": False}}},
        )
    ),
    Case(
        scenario=Scenario(
            name=ACCUMULATED,
            why="two batches make one update",
            model="odd",
            config={"gradient_accumulation_steps": 2},
        ),
        misuse="refused",
    ),
    Case(
        scenario=Scenario(name=BEFORE_FIRST, why="saved before there are moments", model="odd"),
        steps=(0, 1, 2, 3),
        policy="parity",
    ),
    Case(scenario=SCENARIO_OF[RANK_BUFFERS], policy="parity"),
    *(
        Case(
            scenario=Scenario(name=f"policy_{policy}", why="layers fall due at different saves"),
            steps=tuple(range(1, 9)),
            policy=policy,
        )
        for policy in ("parity", "filter", "own")
    ),
    Case(
        scenario=Scenario(name=GIVEN_UP, why="one rank cannot write a save", model="odd"),
        steps=(0, 3, 4),
        policy="parity",
        misuse="given_up",
    ),
)

CASE_OF = {case.name: case for case in CASES}
