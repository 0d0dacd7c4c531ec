"""Trainings that save at every step, faster than the disk may take it, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from layerstore.live.saver.settings import Pressure


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """One training."""

    name: str
    """Of its run."""

    steps: int
    """Each of them is saved."""

    write_seconds: float = 0.0
    """What each write to the store takes longer; such writes also wait until the next update is about to begin."""

    host_buffer: int | str = "auto"
    """Given to ``attach``."""

    on_pressure: Pressure = "wait"
    """Given to ``attach``."""

    is_stuck: bool = False
    """Whether the disk takes nothing before the last step; then DeepSpeed does not save for comparison."""

    is_gated: bool = True
    """Whether updates wait for the copies of the state before them."""

    def folder(self, root: Path) -> Path:
        """Return where DeepSpeed's own checkpoints are."""
        return root / "checkpoints" / self.name

    def facts(self, root: Path, rank: int) -> Path:
        """Return where *rank* leaves what it has seen."""
        return root / f"{self.name}.{rank}.json"


SMALL = "1MiB"
"""Less than one save takes of a rank: its copies wait for the disk."""

SLOW = Course(name="slow", steps=50, write_seconds=0.001, host_buffer=SMALL)
UNGATED = Course(name="ungated", steps=4, write_seconds=0.01, host_buffer=SMALL, is_gated=False)
SKIPPING = Course(name="skipping", steps=12, write_seconds=0.005, host_buffer=SMALL, on_pressure="skip")
DEGRADING = Course(name="degrading", steps=12, write_seconds=0.005, host_buffer=SMALL, on_pressure="degrade")

STUCK = Course(name="stuck", steps=40, write_seconds=0.0001, host_buffer="64MiB", on_pressure="degrade", is_stuck=True)

COURSES = (SLOW, UNGATED, SKIPPING, DEGRADING, STUCK)
