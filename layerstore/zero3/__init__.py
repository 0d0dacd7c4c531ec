"""
DeepSpeed's ZeRO files without torch: find them, and read them into plain values.

This package knows nothing of stores. `layerstore.zero3.pt` reads and writes ``.pt`` files, `layerstore.zero3.trees`
interprets their trees, and `layerstore.zero3.reshard` makes one rank's trees from another's.
"""

from layerstore.zero3.discovery import (
    FoundCheckpoint,
    beside_shards,
    check_unchanged,
    checked_step,
    discover,
    flavour_of,
    holds_zero,
    linked,
    read_latest,
    stamp_of,
    step_of_trainer,
)
from layerstore.zero3.distributed import distributed_at, refuse_file_per_rank, several_distributed
from layerstore.zero3.pointers import Pointer, pointer_bytes, read_pointer, refuse_pointer
from layerstore.zero3.rank_files import RankSource, rank_source
from layerstore.zero3.read import Checkpoint, LayerSource, ObjectSource, Share, SliceSource, read_checkpoint, share_of
from layerstore.zero3.survey import FoundTag, Survey, checkpoints_below
