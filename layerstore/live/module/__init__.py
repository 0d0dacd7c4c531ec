"""
A module and its optimizers, with no engine around them: FSDP2 (``fully_shard``), DDP, one device.

Their commits are those of ``torch.distributed.checkpoint``: keys are the ones of ``get_state_dict``.
"""

from layerstore.live.module.attachable import AttachableModule

__all__ = ["AttachableModule"]
