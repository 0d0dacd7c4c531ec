"""
All weights of a composite, whole: what DeepSpeed's own ``zero_to_fp32`` would make of its shards.

DeepSpeed's loader fills an engine from these where the optimizer's state is not asked for; every rank has all of them.
"""

from typing import TYPE_CHECKING

from layerstore.compose import Composition, Tensors
from layerstore.composite import Composite
from layerstore.dtypes import by_code
from layerstore.live.resume import Loaded
from layerstore.live.revive import bytes_of
from layerstore.store import Store

if TYPE_CHECKING:
    import torch


def whole_weights(store: Store, composition: Composition) -> "dict[str, torch.Tensor]":
    """
    Return the masters, frozen weights and buffers of *composition* by name, in DeepSpeed's order; all is verified.

    Buffers are the first rank's, and floating-point ones become float32, as DeepSpeed has it.
    """
    composite = Composite(store.rooms, composition)
    masters, frozen = composite.tensors("master"), composite.tensors("weights")
    model = Loaded.of(store, composition, rank=0, world_size=composition.base.world_size).model()
    found = {
        name: value.float() if value.is_floating_point() else value
        for name, value in model["module"].items()
        if name in model["buffer_names"]
    }
    for name, shape in (model["frozen_param_shapes"] or {}).items():
        # Of what has no elements nothing is stored.
        found[name] = (
            _tensor(frozen, name) if name in frozen else model["frozen_param_fragments"][name].new_empty(shape)
        )
    found |= {name: _tensor(masters, name) for group in model["param_shapes"] for name in group}
    found |= {alias: found[name] for alias, name in model["shared_params"].items() if name in found}
    return found


def _tensor(tensors: Tensors, name: str) -> "torch.Tensor":
    import torch

    made = torch.empty(tensors.shape(name), dtype=getattr(torch, by_code(tensors.dtype(name)).torch_name))
    target, offset = bytes_of(made.view(-1)), 0
    for part in tensors.parts(name):
        target[offset : offset + part.nbytes] = part.data.cast("B")
        offset += part.nbytes
    return made
