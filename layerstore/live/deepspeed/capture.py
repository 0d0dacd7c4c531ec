"""Capture an engine's state as one rank's share of a checkpoint: slices in live memory, all else copied."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstore.dtypes import by_code
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.live.engine import Captured, Memory, inert
from layerstore.tree import Located, Storage
from layerstore.zero3 import RankSource, rank_source, share_of
from layerstore.zero3.pt import PtFile


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStates:
    """What the engine would write to one rank's two files. The tensors are the engine's own, not copies."""

    model: dict[str, Any]
    model_path: Path
    optimizer: dict[str, Any]
    optimizer_path: Path


def capture(states: SavedStates, *, rank: int, folder: Path, pattern: re.Pattern[str] | None) -> Captured:
    """
    Describe *states*, whose paths are below *folder*.

    Slices stay in place, to be copied before the next update. Counters, buffers and everything else may change at any
    time, so they are copied here.
    """
    model, optimizer = Memory("model"), Memory("optimizer")
    model_file = _file(states.model, states.model_path, model)
    optimizer_file = _file(states.optimizer, states.optimizer_path, optimizer)
    source = rank_source(rank, model_file, optimizer_file)
    slices, buffers = _slices(source), _buffers(source)
    for file, memory in ((model_file, model), (optimizer_file, optimizer)):
        for storage in file.storages:
            if storage in buffers:
                memory.keep_copy(_place(storage))
            elif storage not in slices:
                _settle(storage, memory)
    return Captured(
        share=share_of(source, folder=folder, pattern=pattern),
        states=len({flat.state for flat in source.flats}),
        model=model,
        optimizer=optimizer,
    )


def _file(state: object, path: Path, memory: Memory) -> PtFile:
    tree = inert(state, memory)
    return PtFile(path=path, tree=tree, storages=memory.storages, root=path.stem)


def _slices(source: RankSource) -> set[Storage]:
    """Return the storages that hold slices of layers: flat buffers and frozen fragments."""
    found = {flat.tensor.storage for flat in source.flats}
    if source.has_whole_model:  # trained weights are not copied: they are their rounded masters
        return found | {weights.tensor().storage for weights in source.weights.values()}
    return found | {fragment.tensor().storage for fragment in source.fragments.values()}


def _buffers(source: RankSource) -> set[Storage]:
    """Return the storages of buffers, which also change in forward."""
    module = source.model["module"]
    return {module[name].tensor().storage for name in source.buffers}


def _settle(storage: Storage, memory: Memory) -> None:
    """Copy the content of *storage*: into the tree itself if it is small."""
    place = _place(storage)
    size_bytes = storage.elements * by_code(storage.dtype).bytes
    if size_bytes > INLINE_BYTES_MAX:
        memory.keep_copy(place)
    else:
        storage.content = memory.copied(place) if size_bytes else b""
        memory.drop(place)


def _place(storage: Storage) -> Path:
    assert isinstance(storage.content, Located), "live trees point at memory"
    return storage.content.path
