"""
Compose: from a query to a composite, and from a composite to files, arrays, or the memory of a rank.

``choose`` and ``recipes`` decide what a composite consists of. There is one module for each output format, ``zero3``,
``hf``, ``dcp`` and ``universal``: a new one plans its files as these do, and has them written by ``assemble`` into a
``target``.
"""

from layerstore.compose.choose import (
    Composition,
    check_members,
    check_whole,
    compose_by_policy,
    compose_exact,
    compose_latest,
    losses_told,
    without_damaged,
)
from layerstore.compose.dcp import plan_dcp
from layerstore.compose.delta import DeltaWritten, write_delta
from layerstore.compose.export import Exported, ExportPlan, execute_export
from layerstore.compose.hf import MAX_SHARD_SIZE, plan_export
from layerstore.compose.means import average, base_of_mean
from layerstore.compose.recipes import compose_by_recipe
from layerstore.compose.safetensors import WeightTensor
from layerstore.compose.state_dict import make_state_dict
from layerstore.compose.target import Force, checked_file, write_file
from layerstore.compose.tensors import TensorKind, Tensors, open_tensors
from layerstore.compose.universal import plan_universal
from layerstore.compose.world_size import AdamStep, Moments, RankStates, plan_ranks
from layerstore.compose.zero3 import RankLoad, Written, execute_compose

__all__ = [
    "MAX_SHARD_SIZE",
    "AdamStep",
    "Composition",
    "DeltaWritten",
    "ExportPlan",
    "Exported",
    "Force",
    "Moments",
    "RankLoad",
    "RankStates",
    "TensorKind",
    "Tensors",
    "WeightTensor",
    "Written",
    "average",
    "base_of_mean",
    "check_members",
    "check_whole",
    "checked_file",
    "compose_by_policy",
    "compose_by_recipe",
    "compose_exact",
    "compose_latest",
    "execute_compose",
    "execute_export",
    "losses_told",
    "make_state_dict",
    "open_tensors",
    "plan_dcp",
    "plan_export",
    "plan_ranks",
    "plan_universal",
    "without_damaged",
    "write_delta",
    "write_file",
]
