"""Let real DeepSpeed take up composites at another world size: one launch, all scenarios.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node W \
        -m tests.deepspeed.resizing --out OUT --resume-from DIR [--scenario NAME ...]

Each engine loads the checkpoint of step 2 from ``DIR/<scenario>`` through DeepSpeed's own loader and saves it at
once, unchanged: what lies in ``OUT/<scenario>`` then is what DeepSpeed itself makes of that state on so many ranks.
Then it trains one step, whose losses and norm are in ``trace.jsonl`` as in ``training.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch.distributed as dist

from tests.deepspeed import client_states
from tests.deepspeed.scenarios import RESUME_STEP, SCENARIO_OF, Scenario
from tests.deepspeed.training import Engine, allow_fp16, built_engine, load, train_step


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume-from", required=True, type=Path)
    parser.add_argument("--scenario", action="append", required=True, choices=sorted(SCENARIO_OF))
    arguments = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    allow_fp16()
    for name in arguments.scenario:
        if dist.get_rank() == 0:
            print(f"=== {name}", flush=True)
        with built_engine(SCENARIO_OF[name]) as engine:
            take_up(SCENARIO_OF[name], engine, out=arguments.out, resume_from=arguments.resume_from)
    dist.barrier()
    sys.stdout.flush()
    # All is written. Taking down the threads of torch and gloo now and then aborts the process,
    # which would make good training look failed.
    os._exit(0)


def take_up(scenario: Scenario, engine: Engine, *, out: Path, resume_from: Path) -> None:
    """Load the composite of *scenario*, save it as it is, and train one step."""
    keys = client_states.initial(scenario.client_state).keys()
    client_state = load(scenario, engine, root=resume_from, keys=keys)
    engine.save_checkpoint(
        str(scenario.save_dir(out, step=RESUME_STEP)),
        tag=scenario.tag(step=RESUME_STEP),
        client_state=client_state,
        exclude_frozen_parameters=scenario.exclude_frozen,
    )
    entry = train_step(scenario, engine, step=RESUME_STEP + 1)
    if dist.get_rank() == 0:
        with (out / scenario.name / "trace.jsonl").open("a") as lines:
            lines.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
