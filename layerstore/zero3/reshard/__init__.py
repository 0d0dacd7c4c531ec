"""Make a rank's trees from another's: for another number of ranks, for stage 3, or parameter by parameter."""

from layerstore.zero3.reshard.optimizer import OptimizerState, optimizer_of
from layerstore.zero3.reshard.partitions import as_stage_3, conversion_note, repartitioned
from layerstore.zero3.reshard.sub_groups import plan_sub_groups, regrouped
