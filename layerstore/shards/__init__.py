"""Write DeepSpeed's checkpoints: shards for any number of ranks, and the Universal Checkpoint."""

from layerstore.shards.ranks import RankStates, check_has_moments, plan_optimizer, plan_ranks
from layerstore.shards.universal import plan_universal
from layerstore.shards.write import RankLoad, Written, execute_compose
