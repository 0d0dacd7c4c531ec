"""PyTorch's distributed checkpoints (``torch.distributed.checkpoint``), and FSDP's full form, without torch."""

from layerstore.dcp.metadata import METADATA, Chunk, Entry, KeyPath, metadata_bytes
from layerstore.dcp.read import FlatTensor, Folder, box_runs
from layerstore.dcp.whole import open_folder

__all__ = ["METADATA", "Chunk", "Entry", "FlatTensor", "Folder", "KeyPath", "box_runs", "metadata_bytes", "open_folder"]
