"""
Survey: every ZeRO-3 checkpoint below a folder, in the order of their steps.

Only looked at, never judged: what is incomplete is listed too, so that whoever ingests it hears why it is not.
Symbolic links are not followed.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.errors import InvalidInput, LayerstoreError, SourceCheckpoint
from layerstore.limits import SOURCE_FILES_MAX
from layerstore.zero3.discover import TRAINER_STATE, ZERO3, folder_kind, list_folder
from layerstore.zero3.pointers import read_pointer
from layerstore.zero3.ptfile import read_pt
from layerstore.zero3.read import step_of_trainer
from layerstore.zero3.sourcefile import real_path
from layerstore.zero3.trees import TreeView

# What a compose of ours leaves when it is killed, or has while it runs.
_UNFINISHED_OUTPUT = re.compile(r".+\.(partial|replaced)-[0-9a-f]{8}")
_FIRST = "zero_pp_rank_0_mp_rank_00_model_states.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTag:
    """One checkpoint, by its place."""

    folder: Path
    """The save folder."""
    tag: str
    """DeepSpeed's folder inside it."""
    step: int | None
    """The step that it says of itself; None where that cannot be read."""

    @property
    def path(self) -> Path:
        """The tag's folder."""
        return self.folder / self.tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What lies below some folders."""

    found: tuple[FoundTag, ...]
    """By step; those that tell none by the last number in their name."""
    notes: tuple[str, ...]
    """What was left out, for the user."""


def survey(tops: Iterable[Path]) -> Survey:
    """
    Find every ZeRO-3 checkpoint below the folders *tops*, which may be checkpoints themselves.

    Raises:
        SourceCheckpoint: One of them is no folder, or there is no checkpoint below any of them.
    """
    tops = [real_path(top) for top in tops]
    notes: list[str] = []
    # A dict, because folders may be named that lie inside each other.
    tags = dict.fromkeys(tag for top in tops for tag in _tag_folders(top, notes))
    if not tags:
        raise SourceCheckpoint(
            f"there is no ZeRO-3 checkpoint below {', '.join(map(str, tops))}",
            hint=notes[0] if notes else "give a folder that DeepSpeed, the Trainer, Accelerate or Lightning saved to",
        )
    found = [FoundTag(folder=tag.parent, tag=tag.name, step=_step(tag)) for tag in tags]
    return Survey(found=tuple(sorted(found, key=_order)), notes=tuple(notes))


def _tag_folders(top: Path, notes: list[str]) -> Iterator[Path]:
    if not top.is_dir():
        raise SourceCheckpoint(f"{top} is not a folder", hint="--all takes folders with checkpoints below them")
    pending, count = [top], 0
    while pending:
        folder = pending.pop()
        names = list_folder(folder)
        count += len(names)
        if count > SOURCE_FILES_MAX:
            raise InvalidInput(f"{top} holds more than {SOURCE_FILES_MAX} files; is it the right folder?")
        kind = folder_kind(names)
        if kind == ZERO3:
            pointer = read_pointer(folder / _FIRST)
            if pointer is None:
                yield folder
            else:
                notes.append(f"ignored {folder}: it holds pointers to {pointer.name} in the store {pointer.store}")
            continue
        if kind is not None:
            # By the names alone, and a folder may have such a name: what lies below is looked at all the same.
            notes.append(f"ignored {folder}: it looks like a {kind} checkpoint")
        if "store.json" in names and "objects" in names:
            notes.append(f"ignored {folder}: it is a store")
        elif _UNFINISHED_OUTPUT.fullmatch(folder.name):
            notes.append(f"ignored {folder}: a compose writes it, or has left it unfinished")
        else:
            pending += [folder / name for name in names if _is_own_folder(folder / name)]


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _step(tag: Path) -> int | None:
    """Return the trainer's step, else the engine's as rank 0 has it: good enough to put things in order."""
    state, model = tag.parent / TRAINER_STATE, tag / _FIRST
    if state.is_symlink() or model.is_symlink():
        return None
    try:
        if state.is_file():
            return step_of_trainer(state)
        return TreeView(read_pt(model).tree, path=model)["global_steps"].integer()
    except LayerstoreError:
        return None  # ingest will say what is wrong with it


def _order(found: FoundTag) -> tuple[int, str]:
    if found.step is not None:
        return found.step, str(found.path)
    numbers = re.findall(r"\d+", f"{found.folder.name}/{found.tag}")
    return int(numbers[-1]) if numbers else -1, str(found.path)
