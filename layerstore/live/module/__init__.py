"""
A module and its optimizers, without an engine: FSDP2 (``fully_shard``), DDP, one device.

Their commits have the format of ``torch.distributed.checkpoint``, with the keys of ``get_state_dict``.
"""

from layerstore.live.module.attachable import AttachableModule
from layerstore.live.module.load import ModuleLoad
