"""How large the experiment is: once as it is reported, once so small that it only shows that all of it runs."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

TaskName = Literal["documentation", "docstrings"]
TASKS: tuple[TaskName, ...] = ("documentation", "docstrings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a result depends on, apart from the texts."""

    name: str
    edition: int = 4
    """Raised when the code makes other rows of the same settings: old rows are then left alone."""
    # The model.
    layers: int = 12
    hidden: int = 128
    intermediate: int = 336
    heads: int = 4
    vocabulary: int = 2048
    sequence: int = 128
    # The texts, in bytes; docstrings in pairs for each subpackage.
    texts: str = ""
    """Their digest: with the pinned packages, it is the same everywhere."""
    base_bytes: int = 12_000_000
    task_bytes: int = 8_000_000
    tokenizer_bytes: int = 4_000_000
    pairs_per_package: int = 1000
    files_per_package: int = 200
    # Base training.
    batch: int = 8
    base_steps: int = 2500
    base_rate: float = 2e-3
    base_warmup: int = 100
    base_save_every: int = 100
    # Fine-tuning.
    steps: int = 400
    save_every: int = 5
    task_rate: float = 3e-4
    warmup: int = 20
    failures: tuple[int, ...] = (134, 267)
    # The arms.
    few: int = 25
    """Drift saves one part in so many of all bytes, in its first arm."""
    fewer: int = 150
    """In its second arm; and full saves come only once in so many times."""
    seldom: int = 5
    """Exact saves come once in so many times, which takes about the bytes of delta4 with its keyframes."""
    resume_every: int = 40
    """Steps from one resume to the next, where a job is resumed again and again."""
    distances: tuple[int, ...] = (1, 5, 9, 40, 79)
    """Saves from a keyframe to the save that the precision trial looks at."""
    state_bytes: int = 24_000
    """What every save takes besides layers: counters, schedules, random states. Drift's budget is for layers only."""
    averaged: int = 3
    """Full saves that are averaged."""
    # Evaluation.
    evaluated: int = 256
    """Held-out sequences."""
    checked_after: tuple[int, ...] = (0, 5, 10, 20, 40, 80)
    """Steps after a resume at which these are evaluated; and at the end."""
    items: int = 1000
    """Questions with four answers each."""
    item_context: int = 24
    item_answer: int = 12
    """Tokens of each, at most."""

    def resumed_at(self, failure: int) -> int:
        """Return the step of the newest save before *failure*."""
        return failure // self.save_every * self.save_every

    def rare_base(self, failure: int) -> int:
        """Return the step of the newest save if only one opportunity in *fewer* is taken, the first one too."""
        opportunity = failure // self.save_every - 1
        return (opportunity // self.fewer * self.fewer + 1) * self.save_every

    def equal_work(self, failure: int) -> int:
        """Return the step that a job reaches from its rare save while the others reach the last one."""
        return self.steps - (self.resumed_at(failure) - self.rare_base(failure))

    @property
    def seldom_lost(self) -> int:
        """Return the steps that a failure loses on average if only one save in *seldom* is made."""
        return (self.seldom - 1) * self.save_every // 2

    def checks(self, failure: int) -> list[int]:
        """Return the steps at which a job that resumed after *failure* is evaluated."""
        base = self.resumed_at(failure)
        return sorted({min(base + after, self.steps) for after in self.checked_after} | {self.steps})

    def digest(self, data: str) -> str:
        """Return what rows of one experiment share: these settings, and the digest of the *data*."""
        return hashlib.sha256(json.dumps([asdict(self), data]).encode()).hexdigest()[:12]


REAL = Settings(name="real", texts="7f8226ec0e1c")
TINY = Settings(
    name="tiny",
    layers=4,
    hidden=32,
    intermediate=64,
    heads=2,
    vocabulary=512,
    sequence=32,
    texts="b68f3ab5d79d",
    base_bytes=1_500_000,
    task_bytes=1_500_000,
    tokenizer_bytes=200_000,
    pairs_per_package=40,
    files_per_package=10,
    batch=4,
    base_steps=20,
    base_warmup=4,
    base_save_every=10,
    steps=30,
    save_every=5,
    failures=(12, 23),
    warmup=4,
    few=4,
    state_bytes=14_000,
    fewer=12,
    seldom=3,
    resume_every=10,
    distances=(1, 5),
    averaged=2,
    evaluated=32,
    checked_after=(0, 5),
    items=20,
    item_context=12,
    item_answer=6,
)
SIZES = {size.name: size for size in (REAL, TINY)}
