"""
Recognize checkpoints of ``torch.distributed.checkpoint`` and FSDP by the names in a folder; no file is opened.

Accelerate and the Trainer save the model and the optimizer into two subfolders of one folder.
"""

import re
from pathlib import Path

from layerstore.errors import LayerstoreError, SourceCheckpoint, Unsupported
from layerstore.filenames import DCP, FILE_PER_RANK, FSDP, folder_kind, natural
from layerstore.layers import typed
from layerstore.source import list_folder

_HALF = re.compile(r"(?:pytorch_)?(model|optim)(?:_fsdp|izer)?(.*)")
"""The name of the model's or the optimizer's subfolder; in one save, both names have the same ending."""


def distributed_at(path: Path) -> Path | None:
    """Return the folder of the checkpoint at *path*, or at its parent if *path* is one half; None if there is none."""
    if _is_half(path) and len(_halves(path.parent)) > 1:
        return path.parent
    return path if _kind(path) in FSDP or _halves(path) else None


def several_distributed(path: Path) -> LayerstoreError | None:
    """Make the error for a folder that is not a distributed checkpoint but holds some; None if it holds none."""
    inner = sorted((path / name for name in list_folder(path)), key=lambda entry: natural(entry.name))
    checkpoints = [entry for entry in inner if entry.is_dir() and distributed_at(entry) == entry]
    if not checkpoints:
        return None
    names = f"{', '.join(checkpoint.name for checkpoint in checkpoints[:10])}{' …' if len(checkpoints) > 10 else ''}"
    hint = f"give one of them, or several: layerstore ingest {typed(str(checkpoints[-1]))}"
    return SourceCheckpoint(f"{path} holds distributed checkpoints: {names}", hint=hint)


def refuse_distributed(path: Path) -> None:
    """Raise if *path* is, or holds, a checkpoint that DeepSpeed did not save."""
    whole = distributed_at(path)
    if whole is None:
        several = several_distributed(path)
        if several is not None:
            raise several
        return
    refuse_file_per_rank(whole)
    raise SourceCheckpoint(
        f"{path} is a folder of {_kind(whole) or DCP}, and not of DeepSpeed",
        hint=f"layerstore ingest {typed(str(whole))}",
    )


def refuse_file_per_rank(path: Path) -> None:
    """Raise Unsupported if each rank of FSDP has saved its own file into *path*."""
    if _kind(path) == FILE_PER_RANK:
        raise Unsupported(
            f"{path} is a folder of {FILE_PER_RANK}, which is not supported",
            hint="save with state_dict_type SHARDED_STATE_DICT",
        )


def _is_half(path: Path) -> bool:
    return _HALF.fullmatch(path.name) is not None and _kind(path) == DCP


def _halves(path: Path) -> list[Path]:
    """Return the model's and the optimizer's folder in *path*, or the only one; empty if *path* holds several saves."""
    halves = [path / name for name in list_folder(path) if _is_half(path / name)]
    names = [match.groups() for half in halves if (match := _HALF.fullmatch(half.name))]
    is_one_save = len({end for _, end in names}) == 1 and len({what for what, _ in names}) == len(halves)
    return halves if is_one_save else []


def _kind(path: Path) -> str | None:
    return folder_kind(list_folder(path)) if path.is_dir() else None
