"""Copies of real checkpoints with the bit patterns that careless readers lose.

Written inside the training programs, where deepspeed's classes are at hand: ``torch.save`` needs the real
ones. Only elements that count are changed, never padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.deepspeed.compare import fragments, sliced_tensors, valid_count

PATTERNS: dict[torch.dtype, tuple[torch.dtype, tuple[int, ...]]] = {
    # -0.0, quiet and signalling NaNs with payloads of both signs, infinities, smallest and largest subnormal,
    # and a value whose rounding to half precision is a tie.
    torch.float32: (
        torch.int32,
        (
            -0x80000000,
            0x7FC12345,
            0x7F800001,
            -0x00000001,
            -0x007FFFFF,
            0x7F800000,
            -0x00800000,
            0x00000001,
            0x007FFFFF,
            0x3F808000,
        ),
    ),
    torch.bfloat16: (torch.int16, (-0x8000, 0x7FC1, 0x7F81, -0x0001, 0x7F80, 0x0001)),
}
"""By dtype: the integer type of its width, and the bits as integers of that type."""


def poked_copy(source: Path, target: Path, *, world_size: int) -> None:
    """Copy the shards in *source* to *target*, with special bits in every float tensor of a layer."""
    target.mkdir(parents=True)
    for rank in range(world_size):
        model_path = source / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        (optim_path,) = source.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model_states = torch.load(model_path, weights_only=False)
        optim_states = torch.load(optim_path, weights_only=False)
        for name in model_states["buffer_names"]:
            poke(model_states["module"][name], offset=rank)
        for name, fragment in (model_states["frozen_param_fragments"] or {}).items():
            shape = model_states["frozen_param_shapes"][name]
            poke(fragment[: valid_count(shape, world_size, rank)], offset=rank)
        poke_optimizer(model_states, optim_states["optimizer_state_dict"], rank=rank)
        torch.save(model_states, target / model_path.name)
        torch.save(optim_states, target / optim_path.name)


def poke_optimizer(model_states: Any, states: Any, *, rank: int) -> None:
    """Put special bits into one rank's masters and moments, each tensor beginning with another pattern."""
    world_size = model_states["dp_world_size"]
    for group, shapes in enumerate(model_states["param_shapes"]):
        for offset, flat in enumerate(sliced_tensors(states, group).values()):
            for fragment, shape in zip(fragments(flat, shapes, world_size), shapes.values(), strict=True):
                poke(fragment[: valid_count(shape, world_size, rank)], offset=offset)


def poke(tensor: torch.Tensor, *, offset: int) -> None:
    """Overwrite the first elements of *tensor* in place, starting with pattern number *offset*."""
    if tensor.dtype not in PATTERNS:
        return  # an integer has no bits that arithmetic could lose
    integers, patterns = PATTERNS[tensor.dtype]
    bits = tensor.detach().view(-1).view(integers)
    for index in range(min(len(patterns), bits.numel())):
        bits[index] = patterns[(index + offset) % len(patterns)]
