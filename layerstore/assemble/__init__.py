"""
Assemble: write the files of a composite, whatever their format.

A format plans its files (`layerstore.shards`, `layerstore.hf`, `layerstore.dcp`, `layerstore.delta`); here they are
filled with the bytes of objects, verified, converted and synced, in a folder that appears whole or not at all.
"""

from layerstore.assemble.archives import Archives, Fill, new_tensor, storage_bytes
from layerstore.assemble.assemble import (
    Assembly,
    DerivedCheck,
    OutputFile,
    assembling,
    chunks_of,
    literal_file,
    merged,
    plan_source_file,
    read_mean,
    read_stretch,
    whole,
    written_bytes,
)
from layerstore.assemble.export import Exported, ExportPlan, execute_export
from layerstore.assemble.notes import buffer_notes, export_notes, gathered_notes, moments_notes, notes_of_states
from layerstore.assemble.safetensors import (
    FLOATS,
    INDEX,
    WEIGHTS,
    WEIGHTS_FILE,
    Run,
    WeightsFile,
    WeightTensor,
    header_of,
    index_of,
    weights_file,
    weights_files,
)
from layerstore.assemble.state_dict import make_state_dict
from layerstore.assemble.target import Force, appearing, checked_file, checked_target, write_file
from layerstore.assemble.tensors import TensorKind, Tensors, open_tensors

__all__ = [
    "FLOATS",
    "INDEX",
    "WEIGHTS",
    "WEIGHTS_FILE",
    "Archives",
    "Assembly",
    "DerivedCheck",
    "ExportPlan",
    "Exported",
    "Fill",
    "Force",
    "OutputFile",
    "Run",
    "TensorKind",
    "Tensors",
    "WeightTensor",
    "WeightsFile",
    "appearing",
    "assembling",
    "buffer_notes",
    "checked_file",
    "checked_target",
    "chunks_of",
    "execute_export",
    "export_notes",
    "gathered_notes",
    "header_of",
    "index_of",
    "literal_file",
    "make_state_dict",
    "merged",
    "moments_notes",
    "new_tensor",
    "notes_of_states",
    "open_tensors",
    "plan_source_file",
    "read_mean",
    "read_stretch",
    "storage_bytes",
    "weights_file",
    "weights_files",
    "whole",
    "write_file",
    "written_bytes",
]
