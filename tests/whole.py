"""
Train one engine that saves through layerstore and through DeepSpeed; or resume it from both, and train on.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.whole --out OUT [--resume]

``OUT/<name>.json`` has the losses, norms and learning rates of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

import layerstore
from tests.deepspeed.scenarios import RESUME_STEP, SAVE_STEPS, SCENARIO_OF
from tests.live.tiny import plainly

if TYPE_CHECKING:
    from tests.deepspeed.training import Engine

SCENARIO = SCENARIO_OF["grouped_decay"]
RUN = "live"
STORE, CHECKPOINTS, COMPOSITE = "store", "checkpoints", "composite"
TRAINED, LOADED, RESUMED = "trained", "loaded", "resumed"


def main() -> None:
    """Run what the command line asks for."""
    import deepspeed  # here and below: the test imports this module for its names, in every process

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    out: Path = arguments.out
    deepspeed.init_distributed(dist_backend="gloo")
    if arguments.resume:
        train(out, LOADED, start=lambda engine: engine.load_checkpoint(str(out / COMPOSITE)))
        train(out, RESUMED, start=lambda engine: layerstore.resume(engine, out / STORE, run=RUN, step=RESUME_STEP))
    else:
        train(out, TRAINED)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # taking down the threads of gloo now and then aborts the process


def train(out: Path, name: str, *, start: Callable[[Engine], object] | None = None) -> None:
    """Train to the last save, from the beginning or from what *start* loads."""
    from tests.deepspeed.training import built_engine, train_step

    trace = []
    with built_engine(SCENARIO) as engine:
        if start is not None:
            start(engine)
            assert engine.global_steps == RESUME_STEP, "nothing was loaded"
        with layerstore.attach(engine, out / STORE, run=RUN if start is None else name) as saver:
            for step in range(engine.global_steps + 1, SAVE_STEPS[-1] + 1):
                trace.append(train_step(SCENARIO, engine, step=step))
                if step in SAVE_STEPS:
                    saver.save()
                    with plainly(engine):
                        engine.save_checkpoint(str(out / CHECKPOINTS / name))
    if dist.get_rank() == 0:
        (out / f"{name}.json").write_text(json.dumps(trace))


if __name__ == "__main__":
    main()
