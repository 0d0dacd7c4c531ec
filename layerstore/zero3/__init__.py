"""
DeepSpeed's ZeRO-3 files without torch: find them, read them into plain values, and plan new ones.

This room knows nothing of stores. It maps the bytes of a checkpoint's files to slices of parameters, and the bytes of
objects to places in new files. ``.pt`` files have a door of their own, `layerstore.zero3.pt`.
"""

from layerstore.zero3.discovery import (
    beside_shards,
    check_unchanged,
    discover,
    flavour_of,
    holds_zero3,
    list_folder,
    read_latest,
)
from layerstore.zero3.filenames import (
    LATEST,
    LATEST_BYTES_MAX,
    RANDOM_STATE,
    SHARD_STEM,
    SUMMARY,
    TRAINER_STATE,
    rank_of_file,
)
from layerstore.zero3.gathered import GatheredSource, read_header, tensors_in
from layerstore.zero3.pointer_files import Pointer, pointer_bytes, read_pointer, refuse_pointer
from layerstore.zero3.rank_files import RankSource, buffers_of, rank_source
from layerstore.zero3.read import (
    Checkpoint,
    LayerSource,
    ObjectSource,
    Share,
    SliceSource,
    read_checkpoint,
    share_of,
)
from layerstore.zero3.regroup import Regrouping, plan_regrouping, regrouped, same_bytes, with_own_steps
from layerstore.zero3.rounding import can_convert, can_derive, convert, equal_bytes, newly_infinite
from layerstore.zero3.slices import Piece, Slices, StoragePart, StoredSlice, slice_length, stretches, valid_elements
from layerstore.zero3.sourcefile import OpenedSource, open_source, read_source_file, real_path, stat_source
from layerstore.zero3.survey import FoundTag, Survey, checkpoints_below
from layerstore.zero3.trees import TreeView, config_of, replace_tensors, sub_group_shapes, undivided
from layerstore.zero3.write import (
    BYTES_KEY,
    DerivedCheck,
    OutputFile,
    derived_checks,
    filling_of,
    gathered_pieces,
    merged,
    plan_gathered,
    plan_rank,
    plan_source_file,
    whole,
)

__all__ = [
    "BYTES_KEY", "LATEST", "LATEST_BYTES_MAX", "RANDOM_STATE", "SHARD_STEM", "SUMMARY", "TRAINER_STATE", "Checkpoint",
    "DerivedCheck", "FoundTag", "GatheredSource", "LayerSource", "ObjectSource", "OpenedSource",
    "OutputFile", "Piece", "Pointer", "RankSource", "Regrouping", "Share", "SliceSource", "Slices",
    "StoragePart", "StoredSlice", "Survey", "TreeView", "beside_shards", "buffers_of", "can_convert", "can_derive",
    "check_unchanged", "checkpoints_below", "config_of", "convert", "derived_checks", "discover", "equal_bytes",
    "filling_of", "flavour_of", "gathered_pieces", "holds_zero3", "list_folder", "merged",
    "newly_infinite", "open_source", "plan_gathered", "plan_rank", "plan_regrouping", "plan_source_file",
    "pointer_bytes", "rank_of_file", "rank_source", "read_checkpoint", "read_header", "read_latest", "read_pointer",
    "read_source_file", "real_path", "refuse_pointer", "regrouped", "replace_tensors", "same_bytes", "share_of",
    "slice_length", "stat_source", "stretches", "sub_group_shapes", "tensors_in", "undivided", "valid_elements",
    "whole", "with_own_steps",
]  # fmt: skip
