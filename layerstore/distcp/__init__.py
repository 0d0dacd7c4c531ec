"""
PyTorch's distributed checkpoints (``torch.distributed.checkpoint``), and FSDP's full form, without torch.

``read`` and ``whole`` read a folder, ``onto`` puts it onto a commit, ``write`` makes one.
"""

from layerstore.distcp.metadata import METADATA, Chunk, Entry, metadata_bytes
from layerstore.distcp.onto import read_dcp
from layerstore.distcp.read import Folder
from layerstore.distcp.standalone import read_standalone
from layerstore.distcp.whole import open_folder
from layerstore.distcp.write import plan_dcp

__all__ = [
    "METADATA",
    "Chunk",
    "Entry",
    "Folder",
    "metadata_bytes",
    "open_folder",
    "plan_dcp",
    "read_dcp",
    "read_standalone",
]
