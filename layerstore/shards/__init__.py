"""DeepSpeed's checkpoints written: shards for any number of ranks, and the Universal Checkpoint."""

from layerstore.shards.optimizer import OptimizerState, optimizer_of
from layerstore.shards.ranks import RankStates, plan_ranks
from layerstore.shards.universal import plan_universal
from layerstore.shards.write import RankLoad, Written, execute_compose

__all__ = [
    "OptimizerState",
    "RankLoad",
    "RankStates",
    "Written",
    "execute_compose",
    "optimizer_of",
    "plan_ranks",
    "plan_universal",
]
