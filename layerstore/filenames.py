"""
Interpret the names of files and folders in a checkpoint: their rank, layout and run. Nothing is opened here.
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
MODEL_STATES = "mp_rank_00_model_states.pt"
"""The model's file under stages 1 and 2: one for all ranks."""
RANDOM_STATE = re.compile(r"rng_state(?:_[0-9]{1,7})?\.pth|random_states_[0-9]{1,7}\.pkl")
"""A random state: the Trainer's (without a number if there is only one rank), or Accelerate's."""
_RANKS_RANDOM_STATE = re.compile(r"(?:rng_state|random_states)_(?P<rank>0|[1-9][0-9]{0,6})\.(?:pth|pkl)")
TRAINER_FILES = frozenset({"training_args.bin", "rng_state.pth", "rng_state_0.pth", "scheduler.pt"})
INCOMPLETE = "checkpoint-is-incomplete.txt"
"""Left by an interrupted Trainer."""
WEIGHTS = "model.safetensors"
"""Transformers' weights in one file; several files are numbered, and have an index."""
WEIGHTS_FILE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
WEIGHTS_INDEX = "model.safetensors.index.json"
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""DeepSpeed copies these next to its tags."""
# Compose writes to such a folder, and leaves it behind if compose is killed.
UNFINISHED_OUTPUT = re.compile(r".+\.(partial|replaced)-[0-9a-f]{8}")

ZERO3 = "ZeRO-3"
ZERO12 = "ZeRO-1 or ZeRO-2"
READABLE = frozenset({ZERO3, ZERO12})
"""The kinds of checkpoints that are ingested as they are."""
UNIVERSAL = "universal"
SCHEDULES = frozenset({"scheduler.pt", "scheduler.bin"})
"""The files in which the Trainer and Accelerate keep their own learning-rate schedule."""
DCP_METADATA = ".metadata"
"""The file that locates the tensors of a distributed checkpoint."""
DCP = "torch.distributed.checkpoint"
FULL_STATE_DICT = "FSDP's FULL_STATE_DICT"
FILE_PER_RANK = "FSDP with a file for each rank"
FSDP = frozenset({DCP, FULL_STATE_DICT, FILE_PER_RANK})
"""The kinds of checkpoints that DeepSpeed does not write: their folders are not tags."""
FSDP_MODEL, FSDP_OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.bin"
"""The files of a ``FULL_STATE_DICT``."""
FSDP_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
"""The folders of a ``SHARDED_STATE_DICT``, each a distributed checkpoint."""
WHOLE_MODEL = re.compile(r"mp_rank_(?P<mp>[0-9]{2,4})_model_states\.pt")
"""A file like MODEL_STATES, of any tensor-parallel rank."""
_PIPELINE, _EXPERTS = "pipeline-parallel", "mixture-of-experts (DeepSpeed's own)"
NOT_SUPPORTED = {
    _PIPELINE: "train without pipeline parallelism and save again",
    _EXPERTS: "its experts are in files of their own; Transformers' MoE models, such as Mixtral, can be ingested",
    UNIVERSAL: "ingest the checkpoint that it was made from",
}
"""DeepSpeed's checkpoints that cannot be ingested, and what to do instead."""
# Files of other kinds of checkpoints, and the names of those kinds.
_FOREIGN = (
    (re.compile(r"layer_\d+-model_\d+-model_states\.pt"), _PIPELINE),
    (re.compile(r"layer_-?\d+_expert_\d+_.*|expp_rank_\d+_.*"), _EXPERTS),
    (re.compile(r"zero"), UNIVERSAL),
    (re.compile(r"__\d+_\d+\.distcp|\.metadata"), DCP),
    (re.compile(re.escape(FSDP_MODEL)), FULL_STATE_DICT),
    (re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin"), FILE_PER_RANK),
)

_ONE_OF_SEVERAL_SAVES = re.compile(r"checkpoint[-_]\d+|.*\.ckpt")
# With Accelerate, the user names the folder: these are the names in Accelerate's examples, and common variations.
# `run1` and `run2` do not match: they may be two training runs, whose steps must not become one history.
_STEP_FOLDER = re.compile(r"(?:global_?)?(?:step|epoch|iter|iteration)[-_]?\d+")
# Where Accelerate puts saves that it names itself: PROJECT/checkpoints/checkpoint_N.
_AUTOMATIC_PARENT, _AUTOMATIC = "checkpoints", re.compile(r"checkpoint_\d+")


def folder_kind(names: Iterable[str]) -> str | None:
    """Return the kind of checkpoint, such as ``ZeRO-3``, from the *names* in a folder; None without a checkpoint."""
    names = list(names)
    shards = {match["what"] for name in names if (match := SHARD.fullmatch(name))}
    foreign = next((kind for name in names for pattern, kind in _FOREIGN if pattern.fullmatch(name)), None)
    if "model" in shards and not (foreign == UNIVERSAL and "optim" not in shards):
        return ZERO3
    if foreign is None and any(map(WHOLE_MODEL.fullmatch, names)):
        return ZERO12
    return foreign or (ZERO3 if shards else None)


def is_shard(name: str) -> bool:
    """Whether *name* is DeepSpeed's name for a file of model or optimizer states."""
    return SHARD.fullmatch(name) is not None or WHOLE_MODEL.fullmatch(name) is not None


def is_of_fsdp(name: str) -> bool:
    """Whether *name* is a model or optimizer file of FSDP or of PyTorch's distributed checkpoint."""
    return name == FSDP_OPTIMIZER or folder_kind([name]) in FSDP


def is_text(name: str) -> bool:
    """Whether *name* is valid Unicode, so that a record can hold it and a terminal can show it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def natural(name: str) -> list[tuple[int, str]]:
    """
    Return a key that sorts names by the numbers in them.

    >>> sorted(["step10", "step9"], key=natural)
    ['step9', 'step10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def rank_of_file(name: str) -> int | None:
    """Return the rank whose random state the file *name* holds; None if the file belongs to no rank."""
    match = _RANKS_RANDOM_STATE.fullmatch(name)
    return None if match is None else int(match["rank"])


def owner_of_file(name: str, *, world_size: int) -> int:
    """Return the rank that keeps the file *name*: the owner of a random state, rank 0 for a file without an owner."""
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
