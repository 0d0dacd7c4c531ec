"""
Generated checkpoints, made once for a whole run of the tests: most want one that another has had before.

Pickling one takes fifty times as long as copying it.
"""

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

from tests.bench import generate as bench
from tests.environment import memory

Options = ParamSpec("Options")

_FOLDER = "PYTEST_GENERATED_CHECKPOINTS"
"""Tells workers, and what tests start, where those are that were made."""


def _shared(make: Callable[Concatenate[Path, Options], Path]) -> Callable[Concatenate[Path, Options], Path]:
    @wraps(make)
    def copied(folder: Path, /, *arguments: Options.args, **options: Options.kwargs) -> Path:
        place = os.environ.get(_FOLDER)
        if place is None or folder.exists():
            return make(folder, *arguments, **options)
        made = Path(place) / hashlib.sha256(repr((arguments, sorted(options.items()))).encode()).hexdigest()
        if not made.exists():
            aside = make(made.with_name(secrets.token_hex(8)), *arguments, **options)
            _put(aside, made)
        shutil.copytree(made, folder, copy_function=shutil.copy)  # as new as if it had been written just now
        return folder

    return copied


def _put(aside: Path, made: Path) -> None:
    try:
        aside.rename(made)
    except OSError:  # another process was faster, and its bytes are the same
        if not made.exists():
            raise
        shutil.rmtree(aside)


generate = _shared(bench.generate)


def keep_made() -> Callable[[], None]:
    """Keep from now on what is made, for all processes; return what ends that."""
    folder = tempfile.mkdtemp(prefix="layerstore-generated-", dir=memory())
    os.environ[_FOLDER] = folder

    def end() -> None:
        del os.environ[_FOLDER]
        shutil.rmtree(folder)

    return end


def is_kept() -> bool:
    """Whether that was done, here or where this process was started."""
    return _FOLDER in os.environ
