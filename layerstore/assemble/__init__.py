"""
Assemble: write the files of a composite, whatever their format.

A format plans its files (`layerstore.shards`, `layerstore.hf`, `layerstore.distcp`, `layerstore.delta`); this package
fills them with the bytes of objects, verified, converted and synced, in a folder that appears whole or not at all.
"""

from layerstore.assemble.assemble import (
    Archives,
    Assembly,
    DerivedCheck,
    Fill,
    OutputFile,
    assembling,
    literal_file,
    merged,
    plan_source_file,
    whole,
)
from layerstore.assemble.export import Exported, ExportPlan, execute_export, export_notes
from layerstore.assemble.read import fill_pieces
from layerstore.assemble.safetensors import Run, WeightsFile, WeightTensor, weights_file, weights_files
from layerstore.assemble.target import Force, Writing, appearing, checked_file, checked_target, files_in, write_file
