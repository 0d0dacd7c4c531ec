"""What a run is called where the user gives it no name: as the folder of its training."""

import re
from pathlib import Path

# One of several saves of one training, by the name of its folder.
_PER_STEP = re.compile(r"checkpoint[-_]\d+|.*\.ckpt")
# Accelerate lets the user name the folder: these are the names of its own examples, and what people make of them.
# No more: in `run1` and `run2` lie two trainings, and steps of two must not become one history.
_PER_STEP_OF_ACCELERATE = re.compile(r"(?:global_?)?(?:step|epoch|iter|iteration)[-_]?\d+")
# Where Accelerate puts its saves if it names them itself: PROJECT/checkpoints/checkpoint_N.
_AUTOMATIC_PARENT = "checkpoints"
_AUTOMATIC = re.compile(r"checkpoint_\d+")


def run_name(folder: Path, *, flavour: str) -> str:
    """
    Return the name of the run that the checkpoint in the save folder *folder* is of.

    >>> run_name(Path("out/checkpoint-200"), flavour="hf"), run_name(Path("out"), flavour="raw")
    ('out', 'out')
    >>> run_name(Path("sft/checkpoints/checkpoint_3"), flavour="accelerate")
    'sft'
    >>> run_name(Path("sft/epoch_3"), flavour="accelerate"), run_name(Path("sweep/run3"), flavour="accelerate")
    ('sft', 'run3')
    """
    is_accelerate = flavour == "accelerate"
    if not (_PER_STEP.fullmatch(folder.name) or (is_accelerate and _PER_STEP_OF_ACCELERATE.fullmatch(folder.name))):
        return folder.name
    training = folder.parent
    if is_accelerate and training.name == _AUTOMATIC_PARENT and _AUTOMATIC.fullmatch(folder.name):
        return training.parent.name or training.name
    return training.name
