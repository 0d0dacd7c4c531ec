"""
DeepSpeed's ZeRO-3 files without torch: find them, read them into plain values, and find stored slices.

This room knows nothing of stores. It maps the bytes of a checkpoint's files to slices of parameters, and slices to
their positions in objects. ``.pt`` files have their own package, `layerstore.zero3.pt`.
"""

from layerstore.zero3.counters import STEP, count_of, counter_like, number_of
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
)
from layerstore.zero3.distributed import distributed_at, onto_hint, refuse_file_per_rank, several_distributed
from layerstore.zero3.filenames import (
    FIRST_SHARD,
    FSDP_MODEL,
    FSDP_OPTIMIZER,
    LATEST,
    LATEST_BYTES_MAX,
    MODEL_STATES,
    RANDOM_STATE,
    SHARD_STEM,
    SUMMARY,
    TRAINER_STATE,
    is_shard,
    owner_of_file,
)
from layerstore.zero3.gathered import GatheredSource, read_header, supplier_of, suppliers_of, tensors_in
from layerstore.zero3.means import mean
from layerstore.zero3.pointers import Pointer, pointer_bytes, read_pointer, refuse_pointer
from layerstore.zero3.rank_files import RankSource, rank_source
from layerstore.zero3.read import (
    Checkpoint,
    LayerSource,
    ObjectSource,
    Share,
    SliceSource,
    read_checkpoint,
    share_of,
)
from layerstore.zero3.rounding import can_convert, can_derive, convert, equal_bytes, newly_infinite
from layerstore.zero3.sharding import (
    PartitionSharding,
    Sharding,
    dealt,
    gathered_again,
    is_dealt,
    sharding_in,
)
from layerstore.zero3.slices import (
    Piece,
    Slices,
    StoredSlice,
    Stretch,
    slice_length,
    slices_in,
    valid_elements,
)
from layerstore.zero3.sourcefile import (
    OpenedSource,
    damaged,
    open_source,
    read_source_file,
    real_path,
    stat_source,
    truncated,
)
from layerstore.zero3.survey import FoundTag, Survey, checkpoints_below
from layerstore.zero3.trees import (
    STAGE_3,
    TreeView,
    config_of,
    inner_optimizer,
    leaves_out_frozen,
    masters_in,
    members_of,
    outer_optimizer,
    stage_of,
    sub_group_shapes,
    undivided,
    with_optimizer,
)

__all__ = [
    "FIRST_SHARD", "FSDP_MODEL", "FSDP_OPTIMIZER", "LATEST", "LATEST_BYTES_MAX", "MODEL_STATES", "RANDOM_STATE",
    "SHARD_STEM", "STAGE_3", "STEP", "SUMMARY", "TRAINER_STATE", "Checkpoint", "FoundCheckpoint", "FoundTag",
    "GatheredSource", "LayerSource", "ObjectSource", "OpenedSource", "PartitionSharding", "Piece", "Pointer",
    "RankSource", "Sharding", "Share", "SliceSource", "Slices", "StoredSlice", "Stretch", "Survey", "TreeView",
    "beside_shards", "can_convert", "can_derive", "check_unchanged", "checked_step", "checkpoints_below", "config_of",
    "convert", "count_of", "counter_like", "damaged", "dealt", "discover", "distributed_at", "equal_bytes",
    "flavour_of", "gathered_again", "holds_zero", "inner_optimizer", "is_dealt", "is_shard", "leaves_out_frozen",
    "linked", "masters_in", "mean", "members_of", "newly_infinite", "number_of", "onto_hint", "open_source",
    "outer_optimizer", "owner_of_file", "pointer_bytes", "rank_source", "read_checkpoint", "read_header", "read_latest",
    "read_pointer", "read_source_file", "real_path", "refuse_file_per_rank", "refuse_pointer", "several_distributed",
    "sharding_in", "share_of", "slice_length", "slices_in", "stage_of", "stamp_of", "stat_source", "sub_group_shapes",
    "supplier_of", "suppliers_of", "tensors_in", "truncated", "undivided", "valid_elements", "with_optimizer",
]  # fmt: skip
