"""
The training that the benchmark of drift saves and resumes: the program that each of its ranks runs.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.bench.drift_job --out RESULT.json --data DIR …

The demo's own training, narrower and deeper, done once for every policy, each time the same to the last bit. Once it
goes on uninterrupted after the last save; then an engine is filled from each store in turn, and trains as far beyond.
Evaluation is over text that is never trained on, the same at every seed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import layerstore
from layerstore.live.saver.saver import Saver
from layerstore.policy import Drift, Filter, Latest, Parity, Policy
from tests.bench.published import DEEPSPEED_BYTES
from tests.bench.ranked import asked, begin, end
from tests.ranks.llama import SEQUENCE, Engine, build_engine, corpus

if TYPE_CHECKING:
    import torch

LAYERS = 12
HIDDEN = 64
BATCH = 4
FURTHER_STEPS = 20
HELD_OUT_SHARE = 1 / 16
EVALUATED = 256
"""Samples of the text held out, over all ranks."""

_STRIDE = 1_000_003
"""So far apart are the seeds of the batches of two runs: more than either has steps."""


RUN = "bench"
RARELY = 20
"""A plain full save comes every so manyth time: as few bytes as drift may take."""

THRESHOLD = 0.01
STALEST = 40
"""Every layer's turn comes once in so many saves, which takes half of what drift may take; the budget is the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way to save."""

    name: str
    policy: Callable[[int], Policy]
    """For a model of so many parameters."""
    is_saved: Callable[[int, int], bool] = lambda number, last: True
    """Whether it saves at the moment of this number, of which there are so many after the first."""


def drift(parameters: int, *, share: Fraction) -> Drift:
    """Return drift with a budget of this *share* of a full save."""
    return Drift(threshold=THRESHOLD, budget=int(parameters * DEEPSPEED_BYTES * share), stalest=STALEST, by="norm")


DRIFT = Line(name="drift, 1/40", policy=partial(drift, share=Fraction(1, 40)))
"""What is measured."""
CONTROL = Line(name="full", policy=lambda _: Latest(), is_saved=lambda number, last: number == last)
"""Saved in full at the last moment: what resumes from it is the uninterrupted run, to the last bit."""

LINES = (
    CONTROL,
    Line(name="parity", policy=lambda _: Parity()),
    Line(name="filter", policy=lambda _: Filter()),
    DRIFT,
    Line(name="drift, 1/6", policy=partial(drift, share=Fraction(1, 6))),
    # Its turns lie so that the failure comes just before the next one.
    Line(
        name=f"full, every {RARELY}th",
        policy=lambda _: Latest(),
        is_saved=lambda number, last: number == 0 or (number - last) % RARELY == 1 % RARELY,
    ),
)

OTHER_TEXT = "full, other text"
"""No way to save: the control trained on other batches, which says how far apart equally good runs come."""


@dataclass(slots=True, kw_only=True)
class Course:
    """What was seen of one policy."""

    bytes: list[int] = field(default_factory=list)
    """What each save copied, on all ranks together."""
    base: int = 0
    """The step that was resumed at."""
    layers: dict[str, int] = field(default_factory=dict)
    """The step that each layer's version was saved at."""
    losses: dict[int, float] = field(default_factory=dict)
    """Evaluated so many steps after that."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What one run of the job has shown."""

    seed: int
    parameters: int
    saves: int
    """Moments to save, after the first."""
    last: int
    """The step of the last save."""
    failure: int
    """The step after which the run fails: the next one would be saved."""
    losses: dict[int, float]
    """Of the uninterrupted run, evaluated so many steps after its last save."""
    courses: dict[str, Course]


def main() -> None:
    """Train, save, fail and resume as the command line says."""
    options = asked(seed=int, saves=int, every=int)
    begin()
    job = Job(seed=options.seed, folder=options.data)
    end(job.run(saves=options.saves, every=options.every), options.out)


class Job:
    """An engine, what it reads, and what is saved of it."""

    def __init__(self, *, seed: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self._seed, self._folder = seed, folder
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        kept = int(len(text) * (1 - HELD_OUT_SHARE))
        self._text = text[:kept]
        count = EVALUATED // self._ranks
        self._evaluated = torch.split(_samples(text[kept:], count=count, seed=self._rank), BATCH * 8)
        self.engine: Engine = None

    def run(self, *, saves: int, every: int) -> Result:
        """Save *saves* times after the first, full one; resume from every store."""
        courses = {name: Course() for name in [*(line.name for line in LINES), OTHER_TEXT]}
        for line in LINES:
            courses[line.name].bytes = self._trained(line, saves=saves, every=every)
            if line is CONTROL:
                last, losses = self.engine.global_steps, self._losses(every)
        for name, course in courses.items():
            self._resume(CONTROL.name if name == OTHER_TEXT else name, course)
            course.losses = self._losses(every, other=name == OTHER_TEXT)
        return Result(
            seed=self._seed,
            parameters=self._parameters,
            saves=saves,
            last=last,
            failure=last + every - 1,
            losses=losses,
            courses=courses,
        )

    def _trained(self, line: Line, *, saves: int, every: int) -> list[int]:
        """Train a new engine and save it as *line* says; return what each save copied."""
        import torch.distributed as dist

        if self._rank == 0:
            layerstore.init(self._folder / line.name).close()
        dist.barrier()
        self.engine = build_engine(layers=LAYERS, hidden=HIDDEN, seed=self._seed)
        self._parameters = sum(parameter.ds_numel for parameter in self.engine.module.parameters())
        policy, copied = line.policy(self._parameters), list[int]()
        with layerstore.attach(self.engine, self._folder / line.name, run=RUN, policy=policy) as saver:
            for number in range(saves + 1):
                for _ in range(every):
                    self._step()
                if line.is_saved(number, saves):
                    copied.append(int(_sum(_copied_bytes(saver))))
        if saver.status().failed:
            raise RuntimeError(f"a save came to nothing: {saver.status().errors}")
        return copied

    def _resume(self, name: str, course: Course) -> None:
        resumed = layerstore.resume(self.engine, self._folder / name, run=RUN, must_exist=True)
        assert resumed is not None
        course.base, course.layers = resumed.step, resumed.layers

    def _losses(self, every: int, *, other: bool = False) -> dict[int, float]:
        """Train on; return what evaluation gives at once, after some steps, and that many beyond the failure."""
        found = {0: self._evaluate()}
        for step in range(1, every + FURTHER_STEPS):
            self._step(other=other)
            if step in (FURTHER_STEPS, every - 1 + FURTHER_STEPS):
                found[step] = self._evaluate()
        return found

    def _step(self, *, other: bool = False) -> None:
        """Make one step; which text it reads, or which *other* text, depends on seed, step and rank alone."""
        step = self.engine.global_steps + 1
        seed = (2 * self._seed + other) * _STRIDE + self._ranks * step + self._rank
        tokens = _samples(self._text, count=BATCH, seed=seed)
        self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
        self.engine.step()

    def _evaluate(self) -> float:
        import torch

        self.engine.eval()
        with torch.no_grad():
            total = sum(float(self.engine(input_ids=part, labels=part).loss) * len(part) for part in self._evaluated)
        self.engine.train()
        return _sum(total) / EVALUATED


def _copied_bytes(saver: Saver) -> int:
    """Save; return how much this rank copied of its memory."""
    before = saver.status().copied_bytes
    saver.save()
    saver.wait()
    return saver.status().copied_bytes - before


def _samples(text: "torch.Tensor", *, count: int, seed: int) -> "torch.Tensor":
    import torch

    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - SEQUENCE, (count,), generator=generator)
    return torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()


def _sum(value: float) -> float:
    """Return the sum over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total.item())


if __name__ == "__main__":
    main()
