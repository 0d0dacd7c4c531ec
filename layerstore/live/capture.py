"""What an engine holds now, as one rank's share of a checkpoint: its slices in live memory, all else copied."""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

from layerstore.dtypes import by_code
from layerstore.errors import LayerstoreError
from layerstore.limits import INLINE_BYTES_MAX
from layerstore.live.inert import Memory, NotPlain, inert
from layerstore.live.seams import SavedStates
from layerstore.tree import Located, Storage
from layerstore.zero3 import ObjectSource, RankSource, Share, buffers_of, rank_source, share_of
from layerstore.zero3.pt import PtFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """One rank's share, with the memory that its paths lead to."""

    share: Share
    model: Memory
    optimizer: Memory

    def memory(self, path: Path) -> Memory:
        """Return the memory that holds *path*."""
        return self.model if self.model.holds(path) else self.optimizer

    def mark(self, source: ObjectSource) -> Hashable:
        """Return what changes with *source*: what it is made of, where that lay and how often it had been changed."""
        return source, tuple(self.memory(part.path).mark_of(part.path) for part in source.slices)


def check_client_state(client_state: Mapping[str, object]) -> str:
    """Return what is wrong with *client_state*, empty if nothing: plain trees, tensors and numpy can be kept."""
    try:
        inert(dict(client_state), Memory("client_state"))
    except NotPlain as exc:
        return f"client_state.{exc.where} is a {exc.kind}"
    except (LayerstoreError, RecursionError) as exc:
        # Told, not raised: the other ranks wait to hear from this one.
        return f"client_state cannot be kept: {exc}"
    return ""


def capture(states: SavedStates, *, rank: int, folder: Path, pattern: re.Pattern[str] | None) -> Captured:
    """
    Describe *states*, whose paths are below *folder*. Slices stay where they are: copied before the next update.

    Counters, buffers and all else that is no slice is copied here, since it may change at any time.
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
    return Captured(share=share_of(source, folder=folder, pattern=pattern), model=model, optimizer=optimizer)


def _file(state: object, path: Path, memory: Memory) -> PtFile:
    tree = inert(state, memory)
    return PtFile(path=path, tree=tree, size_bytes=0, storages=memory.storages, root=path.stem)


def _slices(source: RankSource) -> set[Storage]:
    """Return the storages that hold slices of layers: flat buffers and frozen fragments."""
    fragments = source.model.get("frozen_param_fragments")
    found = {flat.tensor.storage for flat in source.flats}
    return found | {of.tensor().storage for _, of in (fragments.children() if fragments is not None else ())}


def _buffers(source: RankSource) -> set[Storage]:
    """Return the storages of buffers, which change in forward too."""
    module = source.model["module"]
    return {module[name].tensor().storage for name in buffers_of(source)}


def _settle(storage: Storage, memory: Memory) -> None:
    """Copy what *storage* holds: small ones into the tree itself."""
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
