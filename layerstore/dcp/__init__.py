"""PyTorch's distributed checkpoints (``torch.distributed.checkpoint``) without torch."""

from layerstore.dcp.metadata import METADATA, Chunk, Entry, KeyPath, metadata_bytes
from layerstore.dcp.read import FlatTensor, Folder, box_runs

__all__ = ["METADATA", "Chunk", "Entry", "FlatTensor", "Folder", "KeyPath", "box_runs", "metadata_bytes"]
