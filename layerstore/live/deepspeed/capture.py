"""Capture an engine's state as one rank's share of a checkpoint: slices in live memory, all else copied."""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from layerstore.dtypes import by_code
from layerstore.errors import LayerstoreError
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.live.deepspeed.engine import SavedStates
from layerstore.live.engine import Memory, NotPlain, inert
from layerstore.tree import Located, Storage
from layerstore.zero3 import ObjectSource, RankSource, Share, rank_source, share_of
from layerstore.zero3.pt import PtFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One rank's share, and the memory that its paths refer to."""

    share: Share
    states: int
    """How many numbers there are for each element that is trained: the master and its moments."""
    model: Memory
    optimizer: Memory

    def memory(self, path: Path) -> Memory:
        """Return the memory that holds *path*."""
        return self.model if self.model.holds(path) else self.optimizer

    @property
    def bytes_by_layer(self) -> dict[str, int]:
        """The bytes of each layer on all ranks together, the same on every rank."""
        return {
            layer.layer: sum(prod(of.shape) * (2 if of.frozen else 4 * self.states) for of in layer.parameters)
            for layer in self.share.layers
        }

    @property
    def has_moments(self) -> dict[str, bool]:
        """Whether the optimizer has updated each layer."""
        return {layer.layer: layer.optimizer_step is not None for layer in self.share.layers}

    def mark(self, source: ObjectSource) -> Hashable:
        """Return a key that changes with *source*: its parts, their addresses, and torch's count of changes to each."""
        return source, tuple(self.memory(part.path).mark_of(part.path) for part in source.slices)


def check_client_state(client_state: Mapping[str, object]) -> None:
    """
    Make sure that *client_state* can be kept: plain trees, tensors and numpy's values.

    Raises:
        NotPlain: It cannot.
    """
    try:
        inert(dict(client_state), Memory("client_state"), where="client_state")
    except (LayerstoreError, RecursionError) as exc:
        raise NotPlain(f"client_state cannot be kept: {exc}") from exc


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
