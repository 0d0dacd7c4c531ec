"""What is trained, resumed and trained on, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tests.deepspeed.scenarios import SCENARIO_OF, Scenario
from tests.live.cases import BEFORE_FIRST, CASE_OF, FUSED_ADAM, RANK_BUFFERS

LAST = 4
"""The last step of every training: all of them are saved while it trains, asynchronously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """One engine, trained to the end, and trained again from a step in the middle."""

    scenario: Scenario
    """What is built."""

    at: int = 2
    """The step resumed from; 0 is before the first update."""

    compared: tuple[int, ...] = ()
    """More steps that DeepSpeed saves by itself as well, beside that one and the last."""

    is_usual: bool = True
    """Whether it belongs to the usual test run."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.scenario.name

    def folder(self, root: Path) -> Path:
        """Return where DeepSpeed's own checkpoints are."""
        return root / "checkpoints" / self.name

    def shards(self, root: Path, step: int) -> Path:
        """Return the folder with DeepSpeed's own shards of *step*."""
        return self.folder(root) / f"global_step{step}"

    def facts(self, root: Path, rank: int) -> Path:
        """Return where *rank* leaves what it has seen."""
        return root / f"{self.name}.{rank}.json"


ODD = "odd_sizes"
FP16 = "fp16"
FROZEN = "frozen"
COMPOSITE = "composite"

COMPILED = (FUSED_ADAM,)
"""Those whose optimizer DeepSpeed compiles first."""

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

RESIZED = (ODD, FROZEN, RANK_BUFFERS, "grouped_blocks_first")
"""Those that the usual test run resumes at other world sizes, too."""

# -- what goes wrong -----------------------------------------------------------------------------------------------

DAMAGED = ("master", "optimizer")
"""Objects of the last rank that are damaged in a copy of the store, for the engine of ODD to resume from."""

MISFITS = {
    "tied": "parameter embed.weight and ",
    COMPOSITE: "the sub-groups of param group 0 and 1 more: ",
    "client_numpy": "the sub-groups of param group 0 and 1 more: 1 in the checkpoint, ",
    FP16: "the checkpoint was saved without bf16, the engine trains with it",
}
"""Other runs that it is asked to resume from, and how what it says of them begins."""
