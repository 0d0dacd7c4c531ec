"""A rank of `tests.bench levels`: save once to memory and a bucket, then resume from either, in turns."""

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

import layerstore
from tests.bench.loop_job import Training, shape_of
from tests.bench.ranked import asked, begin, end

RUN = "run"


@dataclass(slots=True, kw_only=True)
class Result:
    """What resumes took, until the next step was trained."""

    state_bytes: int
    blocked: float = 0.0
    """What the save to memory held training up, in seconds."""
    sent: float = 0.0
    """From the save until the bucket had it."""
    memory: list[float] = field(default_factory=list)
    bucket: list[float] = field(default_factory=list)


def main() -> None:
    """Save, and resume as often as the command line says."""
    options = asked(gb=float, rounds=int, tokens=int, memory=Path, url=str, cache=Path)
    os.environ["LAYERSTORE_CACHE_DIR"] = str(options.cache)
    levels = [str(options.memory), options.url]
    begin()
    training = Training(shape_of(options.gb), sequence=options.tokens)
    training.step()
    result = Result(state_bytes=training.state_bytes())
    with layerstore.attach(training.engine, levels, run=RUN, durable="remote") as saver:
        started = time.monotonic()
        result.blocked = saver.save().blocked_seconds
        saver.wait()
        result.sent = time.monotonic() - started
    for _ in range(options.rounds):
        result.memory.append(_resumed(training, levels))
        dist.barrier()
        if dist.get_rank() == 0:
            for folder in (options.memory, options.cache):
                shutil.rmtree(folder)
        dist.barrier()
        result.bucket.append(_resumed(training, levels))
    end(result, options.out)


def _resumed(training: Training, levels: list[str]) -> float:
    """Resume, and train one step; return the seconds."""
    dist.barrier()
    started = time.monotonic()
    assert layerstore.resume(training.engine, levels, run=RUN, must_exist=True) is not None
    training.step()
    dist.barrier()
    return time.monotonic() - started


if __name__ == "__main__":
    main()
