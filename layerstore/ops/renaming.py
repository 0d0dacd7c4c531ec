"""
Ask Transformers how it writes a model's weights, where their names in memory are not those in its files.

The answer comes from a process of its own, ``layerstore.live.saved_names``: this one imports neither torch nor
Transformers.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from layerstore.errors import Unsupported
from layerstore.export.members import Run, Written
from layerstore.limits import RENAMING_SECONDS_MAX

_PROGRAM = "layerstore.live.saved_names"
_INSTEAD = "compose --format zero3 needs no names"
# Nothing is fetched, and no GPU is woken up.
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}


def may_be_renamed(config: Mapping[str, object]) -> bool:
    """Whether a model with *config* may have other names in files than in memory: from Transformers 5 on, its own."""
    major = str(config.get("transformers_version", "")).partition(".")[0]
    return major.isdecimal() and int(major) >= 5 and "auto_map" not in config


def ask_transformers(
    config: Mapping[str, object] | None, shapes: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> dict[str, Written]:
    """
    Return what ``save_pretrained`` writes of the model with *config*, which holds tensors of these *shapes*.

    *expected* are tensors of its own weights files, which must be among what is returned.

    Raises:
        Unsupported: There is no Transformers to ask, or it does not know.
    """
    named = f" (the base's own weights files have {next(iter(expected))!r})" if expected else ""
    asked = f"the weights are named otherwise in files than in memory{named}"
    if config is None:
        raise Unsupported(f"{asked}, and without a config.json nothing tells how", hint=_INSTEAD)
    if importlib.util.find_spec("transformers") is None:
        raise Unsupported(
            f"only Transformers knows whether a {config.get('model_type')} has other names in files than in memory"
            f"{named}, and it is not installed here",
            hint=f"pip install 'transformers>=5'; {_INSTEAD}",
        )
    answer = _answer(json.dumps({"config": config, "shapes": shapes, "expected": expected}))
    if "error" in answer:
        raise Unsupported(f"{asked}: {answer['error']}", hint=answer.get("hint") or _INSTEAD)
    return {
        name: Written(
            shape=tuple(shape),
            runs=tuple(Run(name=source, start=start, elements=count) for source, start, count in runs),
        )
        for name, (shape, runs) in answer["tensors"].items()
    }


@lru_cache(maxsize=4)  # a program may export many steps of a model, and the answer takes seconds
def _answer(question: str) -> dict[str, Any]:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", _PROGRAM],  # -P: nothing of the folder that somebody stands in is imported
            input=question,
            capture_output=True,
            text=True,
            env=os.environ | _QUIET | {"PYTHONPATH": paths},
            timeout=RENAMING_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise Unsupported(
            f"Transformers did not say in {RENAMING_SECONDS_MAX:.0f} s how it writes the weights", hint=_INSTEAD
        ) from exc
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Unsupported(f"Transformers cannot say how it writes the weights: {said[-1]}", hint=_INSTEAD)
    # Whatever was imported on the way may have said something before.
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
