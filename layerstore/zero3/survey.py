"""
Find every ZeRO checkpoint below a folder, in step order.

Incomplete checkpoints are listed too; ingest reports what is wrong with them. Symbolic links are not followed.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import InvalidInput, LayerstoreError, SourceCheckpoint
from layerstore.filenames import (
    FIRST_SHARD,
    FSDP,
    FSDP_MODEL,
    MODEL_STATES,
    READABLE,
    TRAINER_STATE,
    UNFINISHED_OUTPUT,
    folder_kind,
)
from layerstore.layers import typed
from layerstore.limits import SOURCE_FILES_MAX
from layerstore.source import list_folder, real_path
from layerstore.zero3.discovery import step_of_trainer
from layerstore.zero3.distributed import distributed_at
from layerstore.zero3.pointers import read_pointer
from layerstore.zero3.pt import read_pt
from layerstore.zero3.trees import TreeView


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTag:
    """Where one checkpoint is."""

    folder: Path
    """The save folder."""
    tag: str
    """The name of DeepSpeed's folder inside the save folder."""
    step: int | None
    """The trainer's step, else the engine's; None if neither can be read."""

    @property
    def path(self) -> Path:
        """The tag's folder."""
        return self.folder / self.tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The checkpoints below some folders."""

    found: tuple[FoundTag, ...]
    """By step; a checkpoint without a step is sorted by the last number in its name."""
    notes: tuple[str, ...]
    """Messages for the user about what was left out."""


def checkpoints_below(tops: Iterable[Path]) -> Survey:
    """
    Find every ZeRO checkpoint below the folders *tops*, which may be checkpoints themselves.

    Raises:
        SourceCheckpoint: One of *tops* is not a folder, or there is no checkpoint below any of them.
    """
    tops = [real_path(top) for top in tops]
    notes: list[str] = []
    # A dict, because one of the folders may be inside another.
    tags = dict.fromkeys(tag for top in tops for tag in _tag_folders(top, notes))
    if not tags:
        raise SourceCheckpoint(
            f"there is no ZeRO checkpoint below {', '.join(map(str, tops))}",
            hint=notes[0] if notes else "give a folder that DeepSpeed, the Trainer, Accelerate or Lightning saved to",
        )
    checkpoints = [FoundTag(folder=tag.parent, tag=tag.name, step=_step(tag)) for tag in tags]
    return Survey(found=tuple(sorted(checkpoints, key=_order)), notes=tuple(notes))


def _tag_folders(top: Path, notes: list[str]) -> Iterator[Path]:
    if not top.is_dir():
        raise SourceCheckpoint(f"{top} is not a folder", hint="--all takes folders with checkpoints below them")
    pending, count = [top], 0
    while pending:
        folder = pending.pop()
        names = list_folder(folder)
        count += len(names)
        if count > SOURCE_FILES_MAX:
            raise InvalidInput(f"{top} holds more than {SOURCE_FILES_MAX} files", hint="give a smaller folder")
        kind = folder_kind(names)
        pointer = read_pointer(_model_file(folder) if kind in READABLE else folder / FSDP_MODEL)
        if pointer is not None:
            notes.append(f"ignored {folder}: it holds pointers to {pointer.name} in the store {pointer.store}")
            continue
        if kind in READABLE:
            yield folder
            continue
        if distributed_at(folder) == folder:
            notes.append(f"ignored {folder}: it is not DeepSpeed's; use layerstore ingest {typed(str(folder))}")
        elif kind is not None and kind not in FSDP:
            # Only the file names suggest this kind, and an ordinary folder may have such files: look below it anyway.
            notes.append(f"ignored {folder}: it looks like a {kind} checkpoint")
        if "store.json" in names and "objects" in names:
            notes.append(f"ignored {folder}: it is a store")
        elif UNFINISHED_OUTPUT.fullmatch(folder.name):
            notes.append(f"ignored {folder}: a compose is writing it, or left it unfinished")
        else:
            paths = (folder / name for name in names)
            pending += [path for path in paths if path.is_dir() and not path.is_symlink()]


def _step(tag: Path) -> int | None:
    """Return the trainer's step, else the engine's from rank 0, which is good enough for sorting."""
    state, model = tag.parent / TRAINER_STATE, _model_file(tag)
    if state.is_symlink() or model.is_symlink():
        return None
    try:
        if state.is_file():
            return step_of_trainer(state)
        return TreeView(read_pt(model).tree, path=model)["global_steps"].integer()
    except LayerstoreError:
        return None  # ingest will report what is wrong with it


def _model_file(tag: Path) -> Path:
    first = tag / FIRST_SHARD
    return first if first.exists() or first.is_symlink() else tag / MODEL_STATES


def _order(tag: FoundTag) -> tuple[int, str]:
    if tag.step is not None:
        return tag.step, str(tag.path)
    numbers = re.findall(r"\d+", f"{tag.folder.name}/{tag.tag}")
    return int(numbers[-1]) if numbers else -1, str(tag.path)
