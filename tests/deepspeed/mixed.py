"""Load composites of several steps with real DeepSpeed, save at once what was loaded, and train on.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.deepspeed.mixed --out OUT --resume-from DIR [--scenario NAME ...]

``DIR/<policy>/<scenario>`` holds the composites, based on the last save. Below ``OUT/<policy>`` are then,
for each scenario, the checkpoint that DeepSpeed saved right after loading, and the trace of the steps that followed.
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
from tests.deepspeed.scenarios import POLICIES, SAVE_STEPS, SCENARIO_OF, STEPS, Scenario
from tests.deepspeed.training import allow_fp16, built_engine, train_step

BASE_STEP = SAVE_STEPS[-1]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume-from", required=True, type=Path)
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIO_OF))
    arguments = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    allow_fp16()
    for scenario in [SCENARIO_OF[name] for name in arguments.scenario or SCENARIO_OF]:
        for policy in POLICIES:
            if dist.get_rank() == 0:
                print(f"=== {scenario.name} {policy}", flush=True)
            go_on(scenario, source=arguments.resume_from / policy, out=arguments.out / policy)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see training.py


def go_on(scenario: Scenario, *, source: Path, out: Path) -> None:
    """Load the composite in *source*, save it again into *out*, and train to the last step."""
    with built_engine(scenario) as engine:
        _, loaded = engine.load_checkpoint(
            str(scenario.save_dir(source, step=BASE_STEP)),
            tag=scenario.tag(step=BASE_STEP),
            load_module_strict=not scenario.exclude_frozen,
        )
        assert engine.global_steps == BASE_STEP, f"{scenario.name}: nothing was loaded from {source}"
        engine.save_checkpoint(
            str(scenario.save_dir(out, step=BASE_STEP)),
            tag=scenario.tag(step=BASE_STEP),
            client_state={key: loaded[key] for key in client_states.initial(scenario.client_state)},
            exclude_frozen_parameters=scenario.exclude_frozen,
        )
        for step in range(BASE_STEP + 1, STEPS + 1):
            entry = train_step(scenario, engine, step=step)
            if dist.get_rank() == 0:
                trace = out / scenario.name / "trace.jsonl"
                trace.parent.mkdir(parents=True, exist_ok=True)
                with trace.open("a") as lines:
                    lines.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
