"""The ranks that a composite is written for or loaded on, and what their optimizer continues from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from layerstore.arguments import check_fields
from layerstore.errors import InvalidInput
from layerstore.limits import RANKS_MAX
from layerstore.setting import Setting

Moments = Literal["base", "fresh"]
AdamStep = Literal["unify", "per-layer"]
AdamSteps = Annotated[AdamStep, Setting("the optimizer's step counters: the base's (unify), or each layer's own")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The ranks that a composite is written for, and what their optimizer continues from."""

    world_size: Annotated[int | None, Setting("for how many ranks", metavar="W", default="as many as the base has")] = (
        None
    )
    adam_step: AdamSteps = "unify"
    moments: Annotated[Moments, Setting("the optimizer's moments: the base's, or zero with counters at 0")] = "base"
    like: Annotated[
        str | None,
        Setting(
            "the commit that supplies DeepSpeed's own state for what FSDP2 saved, advanced by the updates since",
            metavar="REF",
            default="the newest of the history",
        ),
    ] = None
    as_zero3: bool = False
    """Whether the shards have stage 3, whatever stage the base was saved under."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.world_size is not None and not 1 <= self.world_size <= RANKS_MAX:
            raise InvalidInput(
                f"a checkpoint cannot have {self.world_size} ranks", hint=f"choose a world size of 1 to {RANKS_MAX:,}"
            )
        if self.moments == "fresh" and self.adam_step == "per-layer":
            raise InvalidInput(
                "fresh moments have no steps of their own", hint="leave --adam-step out: the optimizer counts from 0"
            )
