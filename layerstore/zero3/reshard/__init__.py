"""A rank's trees made from layerstore.zero3.reshard.optimizer import OptimizerState, optimizer_of
from layerstore.zero3.reshard.optimizer import OptimizerState, optimizer_of
from another's: for other numbers of ranks, and for stage 3."""

from layerstore.zero3.reshard.partitions import as_stage_3, conversion_note, repartitioned
from layerstore.zero3.reshard.sub_groups import plan_sub_groups, regrouped

__all__ = [
    "as_stage_3",
    "conversion_note",
    "plan_sub_groups",
    "regrouped",
    "repartitioned",
]
