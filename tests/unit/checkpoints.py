"""Small checkpoints by their steps."""

from pathlib import Path
from typing import Any

from tests.generated import generate


class Checkpoints:
    """Small checkpoints, each another one unless it is asked for again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, step: int, *, seed: int | None = None, **options: Any) -> Path:
        """Return the checkpoint of *step*."""
        seed = step if seed is None else seed
        return generate(self._folder / f"{step}-{seed}", layers=2, hidden=8, vocab=8, step=step, seed=seed, **options)
