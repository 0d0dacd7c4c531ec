"""Capture an engine's state as one rank's share of a checkpoint: slices in live memory, everything else copied."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from layerstore.live.engine import Captured, Memory, inert, place_of
from layerstore.tree import Storage
from layerstore.zero3 import RankSource, rank_source, share_of
from layerstore.zero3.pt import PtFile
from layerstore.zero3.trees import undivided


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStates:
    """The content of one rank's two files; the tensors are the engine's own, not copies."""

    model: dict[str, Any]
    model_path: Path
    optimizer: dict[str, Any]
    optimizer_path: Path


def capture(states: SavedStates, *, rank: int, folder: Path, pattern: re.Pattern[str] | None) -> Captured:
    """
    Return *states*, whose paths are below *folder*, as this rank's share of a save.

    Slices stay in place, to be copied before the next update. Counters, buffers and everything else may change at any
    time, so they are copied now.
    """
    model, optimizer = Memory("model"), Memory("optimizer")
    model_file = _file(states.model, states.model_path, model)
    optimizer_file = _file(states.optimizer, states.optimizer_path, optimizer)
    source = rank_source(rank, model_file, optimizer_file)
    slices, buffers = _slices(source), _buffers(source)
    for file, memory in ((model_file, model), (optimizer_file, optimizer)):
        for storage in file.storages:
            if storage in buffers:
                memory.keep_copy(place_of(storage))
            elif storage not in slices:
                memory.settle(storage)
    share = share_of(source, folder=folder, pattern=pattern)
    # Sizes are estimates: 4 bytes for each trained element's master and for each of its moments, 2 if it is frozen.
    numbers = len({flat.state for flat in source.flats})
    return Captured(
        share=share,
        bytes_by_layer={
            layer.layer: sum(
                prod(parameter.shape) * (2 if parameter.frozen else 4 * numbers) for parameter in layer.parameters
            )
            for layer in share.layers
        },
        moments={layer.layer: layer.optimizer_step is not None for layer in share.layers},
        undivided=undivided(share.state),
        model=model,
        optimizer=optimizer,
    )


def _file(state: object, path: Path, memory: Memory) -> PtFile:
    tree = inert(state, memory)
    return PtFile(path=path, tree=tree, storages=memory.storages, root=path.stem)


def _slices(source: RankSource) -> set[Storage]:
    """Return the storages that hold slices of layers: flat buffers and frozen fragments."""
    storages = {flat.tensor.storage for flat in source.flats}
    if source.has_whole_model:  # trained weights are not stored: they are the rounded masters
        return storages | {weights.tensor().storage for weights in source.weights.values()}
    return storages | {fragment.tensor().storage for fragment in source.fragments.values()}


def _buffers(source: RankSource) -> set[Storage]:
    """Return the storages of buffers, which even a forward pass changes."""
    module = source.model["module"]
    return {module[name].tensor().storage for name in source.buffers}
