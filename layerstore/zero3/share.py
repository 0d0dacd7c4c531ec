"""
One rank's share of a checkpoint, as that rank alone can tell: the slices that it holds, and its state.

What only all ranks together know is left to whoever joins their shares: whether they agree, whether buffers are alike,
and which names are tied, which the first rank alone records.
"""

import re
from dataclasses import dataclass
from pathlib import PurePath

from layerstore.errors import LayoutMismatch
from layerstore.format.hashing import object_id
from layerstore.model import RankState
from layerstore.zero3.checkpoint import LayerSource
from layerstore.zero3.cut import cut_layers
from layerstore.zero3.members import buffers_of, check_names, frozen_of, optimizer_steps, parameters_of
from layerstore.zero3.ranks import RankSource, check_flats, check_states, param_shapes
from layerstore.zero3.read import state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has of a checkpoint."""

    rank: int
    world_size: int
    layers: tuple[LayerSource, ...]
    """Every layer, in the model's order, with this rank's objects only."""
    state: RankState
    """Files still left out."""
    agreement: str
    """A hash of all that the ranks of one save have in common."""


def share_of(rank: RankSource, *, folder: PurePath, pattern: re.Pattern[str] | None) -> Share:
    """
    Describe what *rank* holds; the paths of its files are below *folder*.

    Raises:
        LayoutMismatch: A length does not fit its parameter.
        Unsupported: State of the optimizer lives elsewhere.
    """
    world_size = rank.model["dp_world_size"].integer()
    groups = param_shapes(rank)
    check_flats([rank], groups, world_size)
    check_states([rank])
    check_names(rank, groups)
    steps = optimizer_steps(rank, len(groups))
    parameters, buffers = parameters_of(rank, groups), buffers_of(rank)
    if not 0 <= rank.rank < world_size:
        raise LayoutMismatch(f"rank {rank.rank} is none of {world_size}")
    common = (
        world_size,
        rank.model["global_steps"].integer(),
        [[(name, tuple(shape)) for name, shape in group.items()] for group in groups],
        [(flat.state, flat.group, flat.tensor.storage.dtype) for flat in rank.flats],
        steps,
        [(name, str(found)) for name, found in frozen_of(rank).items()],
        [(buffer.name, buffer.dtype, buffer.shape) for buffer in buffers.values()],
    )
    return Share(
        rank=rank.rank,
        world_size=world_size,
        layers=cut_layers([rank], groups, parameters, buffers, steps=steps, world_size=world_size, pattern=pattern),
        state=state_of(rank, folder, buffers),
        agreement=object_id(repr(common).encode()),
    )
