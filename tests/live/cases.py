"""What the launched programs train, save, load and resume, as plain data.

Imports neither torch nor deepspeed: pytest reads it while collecting, the launched programs while training.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from layerstore.live.saver.options import Mode, Pressure
from layerstore.policy import Drift, Filter, Latest, Parity, Policy, Save
from layerstore.tree import Tree
from tests.deepspeed.scenarios import SCENARIO_OF, Scenario

EXAMPLES_FOLDER = Path(__file__).parents[2] / "docs" / "examples"
EXAMPLES = ("with_deepspeed", "with_slurm", "with_bucket", "with_trainer", "with_accelerate")

BUCKET = "s3://first-bucket/sft"
"""Where with_bucket pushes to."""


class Trained:
    """Something that is trained by a launch, and where that leaves what."""

    name: str
    """The run's name."""

    def folder(self, root: Path) -> Path:
        """Return where DeepSpeed's own checkpoints are."""
        return root / "checkpoints" / self.name

    def shards(self, root: Path, step: int) -> Path:
        """Return the folder with DeepSpeed's own shards of *step*."""
        return self.folder(root) / f"global_step{step}"

    def facts(self, root: Path, rank: int) -> Path:
        """Return where *rank* leaves what it has seen."""
        return root / f"{self.name}.{rank}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfScenario(Trained):
    """An engine of the DeepSpeed tests."""

    scenario: Scenario
    """What is built."""

    @property
    def name(self) -> str:  # type: ignore[override]  # nobody sets it
        """The scenario's name."""
        return self.scenario.name


CPU_ADAM = "cpu_adam"
FUSED_ADAM = "configured"
COMPILED = (CPU_ADAM, FUSED_ADAM)
"""Scenarios whose optimizer DeepSpeed compiles first."""

# -- saving ----------------------------------------------------------------------------------------------------------


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
    "drift": Drift(threshold=0, budget=20_000, stalest=100),  # enough for one block of three
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(OfScenario):
    """One engine, and the saver that is attached to it."""

    steps: tuple[int, ...] = (1, 2, 3)
    """Steps after which it is saved; 0 is before the first."""

    policy: str = "latest"
    """The saver's, one of `POLICIES`."""

    mode: Mode = "async"
    """Given to ``attach``."""

    misuse: Literal["", "refused", "given_up", "frozen_changed", "own_save"] = ""
    """What is done meanwhile that is wrong, or unusual."""

    @property
    def accumulated(self) -> int:
        """How many batches make one update."""
        found = self.scenario.config.get("gradient_accumulation_steps", 1)
        assert isinstance(found, int)
        return found


OVERFLOW = "overflow"
FROZEN = "frozen"
EXCLUDED = "frozen_excluded"
ACCUMULATED = "accumulated"
BEFORE_FIRST = "before_first"
RANK_BUFFERS = "rank_buffers"
GIVEN_UP = "given_up"
DRIFT = "policy_drift"

CHANGED_AT = 2
"""The step after which a frozen weight is changed by hand."""

# What is special to saving, with some of the scenarios; the resumptions below save and resume all of them.
CASES: tuple[Case, ...] = (
    Case(scenario=SCENARIO_OF["tied"], mode="sync"),
    Case(scenario=SCENARIO_OF[FROZEN], misuse="frozen_changed"),
    Case(scenario=SCENARIO_OF[EXCLUDED], misuse="own_save"),
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
    Case(scenario=SCENARIO_OF["stage1"], policy="parity"),
    Case(scenario=SCENARIO_OF["stage1_fp32_gradients"]),
    Case(scenario=SCENARIO_OF["stage2_frozen"], policy="drift"),
    *(
        Case(
            scenario=Scenario(name=f"policy_{policy}", why="layers fall due at different saves"),
            steps=tuple(range(1, 9)),
            policy=policy,
        )
        for policy in ("parity", "filter", "own")
    ),
    Case(
        scenario=Scenario(name=DRIFT, why="layers fall due by how far they move", frozen=("model.layers.0",)),
        policy="drift",
    ),
    Case(
        scenario=Scenario(name=GIVEN_UP, why="one rank cannot write a save", model="odd"),
        steps=(0, 3, 4),
        policy="parity",
        misuse="given_up",
    ),
)

CASE_OF = {case.name: case for case in CASES}

# -- saving at every step, faster than the disk may take it ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Course(Trained):
    """A training that saves at every step."""

    name: str

    steps: int
    """Each of them is saved."""

    write_seconds: float = 0.0
    """What each write to the store takes longer; such writes also wait until the next update is about to begin."""

    host_buffer: int | str = "auto"
    """Given to ``attach``."""

    on_pressure: Pressure = "wait"
    """Given to ``attach``."""

    is_stuck: bool = False
    """Whether the disk takes nothing before the last step; then DeepSpeed does not save for comparison."""

    is_gated: bool = True
    """Whether updates wait for the copies of the state before them."""


SMALL = "1MiB"
"""Less than one save takes of a rank: its copies wait for the disk."""

SLOW = Course(name="slow", steps=50, write_seconds=0.001, host_buffer=SMALL)
UNGATED = Course(name="ungated", steps=4, write_seconds=0.01, host_buffer=SMALL, is_gated=False)
SKIPPING = Course(name="skipping", steps=12, write_seconds=0.005, host_buffer=SMALL, on_pressure="skip")
DEGRADING = Course(name="degrading", steps=12, write_seconds=0.005, host_buffer=SMALL, on_pressure="degrade")
STUCK = Course(name="stuck", steps=40, write_seconds=0.0001, host_buffer="64MiB", on_pressure="degrade", is_stuck=True)

COURSES = (SLOW, UNGATED, SKIPPING, DEGRADING, STUCK)

# -- resuming --------------------------------------------------------------------------------------------------------

LAST = 4
"""The last step of every training that is resumed: all of them are saved while it trains, asynchronously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption(OfScenario):
    """One engine, trained to the end, and trained again from a step in the middle."""

    at: int = 2
    """The step resumed from; 0 is before the first update."""

    compared: tuple[int, ...] = ()
    """More steps that DeepSpeed saves by itself as well, beside that one and the last."""

    is_usual: bool = True
    """Whether it belongs to the usual test run."""


ODD = "odd_sizes"
FP16 = "fp16"
COMPOSITE = "composite"

_USUAL = (
    ODD,  # bf16, tiny sub-groups, parameters that stay gathered
    FP16,
    "fp32",
    "partitioned_late",  # stage3_param_persistence_threshold is 0, elsewhere the default
    FROZEN,
    RANK_BUFFERS,
    "tied",
    "grouped_blocks_first",
    "offloaded",
    FUSED_ADAM,  # its step counter is an integer
    "client_numpy",
    "stage1",
    "stage2_frozen",
    "stage2_fp16",
    "stage2_round_robin",
)

RESUMPTIONS: tuple[Resumption, ...] = (
    *(Resumption(scenario=SCENARIO_OF[name]) for name in _USUAL),
    Resumption(scenario=CASE_OF[BEFORE_FIRST].scenario, at=0),
    # All in one flat buffer: layers of two steps come to lie side by side.
    Resumption(
        scenario=replace(SCENARIO_OF[ODD], name=COMPOSITE, grouping="single", zero={}, scheduler="none"),
        at=3,
        compared=(2,),
    ),
    *(
        Resumption(scenario=scenario, is_usual=False)
        for scenario in SCENARIO_OF.values()
        if scenario.name not in _USUAL and scenario.client_state != "lightning" and scenario.resumes_alike
    ),
)

RESUMPTION_OF = {each.name: each for each in RESUMPTIONS}
USUAL = tuple(each for each in RESUMPTIONS if each.is_usual)
WHOLE = tuple(each for each in USUAL if each.name != COMPOSITE)
"""Resumed just as they were saved; the composite is mixed from two steps."""

TO_STAGE_3 = ("stage1", "stage2_frozen", "stage2_fp16", "stage2_round_robin")
"""Those that are resumed under stage 3, too."""

RESIZED = (ODD, FROZEN, RANK_BUFFERS, "grouped_blocks_first", "stage2_frozen")
"""Those that are resumed at other world sizes, too."""

FROM_CLONE = "grouped_blocks_first"
"""The one of them that more ranks resume from a clone of the bucket, and not from its URL."""

DAMAGED = ("master", "optimizer")
"""Objects of the last rank that are damaged in a copy of the store, for the engine of ODD to resume from."""

MISFITS = {
    "tied": "parameter embed.weight and ",
    COMPOSITE: "the sub-groups of param group 0 and 1 more: ",
    "client_numpy": "the sub-groups of param group 0 and 1 more: 1 in the checkpoint, ",
    FP16: "the checkpoint was saved without bf16, but the engine trains with it",
}
"""Other runs that it is asked to resume from, and how what it says of them begins."""

# -- loading a folder through DeepSpeed ------------------------------------------------------------------------------

LOADED = (
    *("tied", "frozen", "many_sub_groups", "bf16_master", "rank_buffers", "empty_parameter"),
    *("stage1_frozen", "stage2_fp32"),
)
"""Scenarios of which folders are loaded."""

WAYS: dict[str, dict[str, Any]] = {
    "weights": {"load_optimizer_states": False},
    "module": {"load_module_only": True},
    "weights_of_module": {"load_module_only": True, "load_optimizer_states": False},
    "no_schedule": {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    # DeepSpeed reads `latest` all the same, for the weights.
    "earlier": {"load_optimizer_states": False, "tag": "global_step1"},
}
"""How a folder is loaded."""
