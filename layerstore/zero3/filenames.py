"""
The names of files and folders in a checkpoint: which rank's, whose layout, which run. Nothing is opened here.
"""

import re
from collections.abc import Iterable
from pathlib import Path

LATEST = "latest"
"""DeepSpeed's file that names the newest tag."""
LATEST_BYTES_MAX = 4096
TRAINER_STATE = "trainer_state.json"
SUMMARY = "layerstore.json"
"""Compose writes it next to the shards. It describes one composite, so it is never ingested."""
SHARD_STEM = re.compile(
    r"(?P<prefix>bf16_)?zero_pp_rank_(?P<rank>0|[1-9][0-9]{0,6})_mp_rank_(?P<mp>[0-9]{2,4})_(?P<what>model|optim)_states"
)
"""One rank's ``.pt`` file, without the suffix."""
SHARD = re.compile(SHARD_STEM.pattern + r"\.pt")
FIRST_SHARD = "zero_pp_rank_0_mp_rank_00_model_states.pt"
RANDOM_STATE = re.compile(r"rng_state(?:_[0-9]{1,7})?\.pth|random_states_[0-9]{1,7}\.pkl")
"""A random state: the Trainer's (without a number where there is only one rank), or Accelerate's."""
_RANKS_RANDOM_STATE = re.compile(r"(?:rng_state|random_states)_(?P<rank>0|[1-9][0-9]{0,6})\.(?:pth|pkl)")
TRAINER_FILES = frozenset({"training_args.bin", "rng_state.pth", "rng_state_0.pth", "scheduler.pt"})
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""The Trainer leaves it when it was interrupted."""
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""DeepSpeed copies these beside its tags."""
# A compose writes to such a folder, and leaves it behind when it is killed.
UNFINISHED_OUTPUT = re.compile(r".+\.(partial|replaced)-[0-9a-f]{8}")

ZERO3 = "ZeRO-3"
# Files of other kinds of checkpoints, and what to call these.
_FOREIGN = (
    (re.compile(r"mp_rank_\d+_model_states\.pt"), "ZeRO stage 0, 1 or 2"),
    (re.compile(r"layer_\d+-model_\d+-model_states\.pt"), "pipeline-parallel"),
    (re.compile(r"layer_-?\d+_expert_\d+_.*|expp_rank_\d+_.*"), "mixture-of-experts (stages 1 and 2)"),
    (re.compile(r"zero"), "universal"),
    (re.compile(r"__\d+_\d+\.distcp|\.metadata"), "torch.distributed.checkpoint"),
)

_ONE_OF_SEVERAL_SAVES = re.compile(r"checkpoint[-_]\d+|.*\.ckpt")
# With Accelerate the user names the folder: its own examples' names, and what people make of them. Not `run1` and
# `run2`: these may be two trainings, whose steps must not become one history.
_STEP_FOLDER = re.compile(r"(?:global_?)?(?:step|epoch|iter|iteration)[-_]?\d+")
# Where Accelerate puts its saves if it names them itself: PROJECT/checkpoints/checkpoint_N.
_AUTOMATIC_PARENT, _AUTOMATIC = "checkpoints", re.compile(r"checkpoint_\d+")


def folder_kind(names: Iterable[str]) -> str | None:
    """Return ``ZeRO-3`` or another kind of checkpoint, by the *names* in its folder; None if it is none."""
    names = list(names)
    shards = {match["what"] for name in names if (match := SHARD.fullmatch(name))}
    foreign = next((kind for name in names for pattern, kind in _FOREIGN if pattern.fullmatch(name)), None)
    return ZERO3 if "model" in shards else foreign or (ZERO3 if shards else None)


def is_text(name: str) -> bool:
    """Whether *name* is valid Unicode: a record can hold it, and a terminal show it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def rank_of_file(name: str) -> int | None:
    """Return the rank whose random state the file *name* holds, None if it is no rank's own."""
    match = _RANKS_RANDOM_STATE.fullmatch(name)
    return None if match is None else int(match["rank"])


def owner_of_file(name: str, *, world_size: int) -> int:
    """Return the rank that keeps the file *name*: its own random state, or the first for those of no rank."""
    rank = rank_of_file(name)
    return rank if rank is not None and rank < world_size else 0


def run_name(folder: Path, *, flavour: str) -> str:
    """
    Return the name of the run that a checkpoint in the save folder *folder* belongs to.

    >>> run_name(Path("out/checkpoint-200"), flavour="hf"), run_name(Path("out"), flavour="raw")
    ('out', 'out')
    >>> run_name(Path("sft/checkpoints/checkpoint_3"), flavour="accelerate")
    'sft'
    >>> run_name(Path("sft/epoch_3"), flavour="accelerate"), run_name(Path("sweep/run3"), flavour="accelerate")
    ('sft', 'run3')
    """
    is_accelerate = flavour == "accelerate"
    if not (_ONE_OF_SEVERAL_SAVES.fullmatch(folder.name) or (is_accelerate and _STEP_FOLDER.fullmatch(folder.name))):
        return folder.name
    training = folder.parent
    if is_accelerate and training.name == _AUTOMATIC_PARENT and _AUTOMATIC.fullmatch(folder.name):
        return training.parent.name or training.name
    return training.name
