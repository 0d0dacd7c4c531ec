"""
PyTorch's distributed checkpoints and FSDP's full state dicts, read and written without importing torch.

``read`` and ``whole`` read a folder, ``standalone`` makes a commit of it, ``onto`` ingests it onto a DeepSpeed commit.
``contents`` identifies a folder's tensors, ``names`` gives a commit's tensors their keys, and ``write`` makes a folder.
"""

from layerstore.distcp.boxes import Boxes
from layerstore.distcp.contents import Contents, splits
from layerstore.distcp.metadata import Chunk, Entry, metadata_bytes
from layerstore.distcp.names import Named, names_of
from layerstore.distcp.onto import read_dcp
from layerstore.distcp.plan import Item, PlannedSave, Work, common_step, plan_save
from layerstore.distcp.read import DcpFolder
from layerstore.distcp.standalone import read_standalone
from layerstore.distcp.whole import open_folder
from layerstore.distcp.write import plan_dcp
