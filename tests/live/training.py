"""Train the cases on real DeepSpeed ranks, and save each step twice: through savers, and by DeepSpeed itself.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.live.training --out OUT

``OUT/store`` gets the savers' runs, ``OUT/checkpoints/<case>`` DeepSpeed's folders, ``OUT/<case>.<rank>.json``
what each rank has seen: what was due, what was refused, how much was staged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

import layerstore
from layerstore.live.saver.saver import Saver
from layerstore.model import StoredObject
from layerstore.publish.staging import Staging
from layerstore.store import Store
from layerstore.zero3 import ObjectSource
from tests.deepspeed import client_states, models
from tests.deepspeed.training import DTYPES, allow_fp16, built_engine
from tests.live.cases import CASE_OF, CASES, CPU_ADAM, FUSED_ADAM, POLICIES, Case
from tests.live.misuse import Gatekeeper, attempt, saved, try_misuse
from tests.live.plain import plainly

Facts = dict[str, Any]

COMPILED = (CPU_ADAM, FUSED_ADAM)
"""Cases whose optimizer DeepSpeed compiles first."""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--case", action="append", choices=sorted(CASE_OF))
    arguments = parser.parse_args()
    begin(arguments.out)
    allow_fp16()
    some = [CASE_OF[name] for name in arguments.case or ()]
    for case in some or CASES:
        if dist.get_rank() == 0:
            print(f"=== {case.name}", flush=True)
        facts: Facts = {"unavailable": "", "saves": {policy: {} for policy in case.policies}}
        try:
            with built_engine(case.scenario) as engine:
                run_case(case, engine, arguments.out, facts)
        except RuntimeError as exc:
            # No compiler, or one that is too old: that is no fault of ours.
            if case.name not in COMPILED or "extension" not in str(exc):
                raise
            facts["unavailable"] = str(exc)
        case.facts(arguments.out, dist.get_rank()).write_text(json.dumps(facts))
    end()


def begin(out: Path) -> None:
    """Join the ranks, and make a store that all of them see."""
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() == 0:
        layerstore.init(out / "store")
    dist.barrier()


def end() -> None:
    """Leave at once: taking down the threads of torch and gloo now and then aborts the process."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def run_case(case: Case, engine: Any, out: Path, facts: Facts) -> None:
    """Train *engine* to the last step of *case*, saving as it says."""
    gatekeeper = Gatekeeper()
    client_state = client_states.initial(case.scenario.client_state)
    with counted_stagings() as staged:
        savers = {
            policy: layerstore.attach(
                engine,
                Store(out / "store", hook=gatekeeper.hook),
                run=case.run(policy),
                policy=POLICIES[policy],
                mode=case.mode,
                frozen="exclude" if case.scenario.exclude_frozen else "once",
            )
            for policy in case.policies
        }
        if 0 in case.steps:
            save(case, engine, savers, out, facts, client_state)
        for step in range(1, case.steps[-1] + 1):
            train_step(case, engine, step, savers, facts)
            client_states.advance(client_state)
            if case.misuse and step < case.steps[-1]:
                try_misuse(case.misuse, step, savers, facts, gatekeeper)
            if step in case.steps:
                save(case, engine, savers, out, facts, client_state)
        for saver in savers.values():
            saver.close()
    facts["staged"] = staged
    facts["skipped_steps"] = engine.skipped_steps
    facts["status"] = {policy: asdict(saver.status()) for policy, saver in savers.items()}


def train_step(case: Case, engine: Any, step: int, savers: dict[str, Saver], facts: Facts) -> None:
    """Do one update; try to save before the last of its batches."""
    for batch in range(case.accumulated):
        if batch:
            facts.setdefault("off_boundary", []).append(attempt(next(iter(savers.values())).save))
        tensors = models.batch(
            case.scenario.model, step=10 * step + batch, rank=dist.get_rank(), dtype=DTYPES[case.scenario.precision]
        )
        loss = models.loss_of(engine(**{name: tensor.to(engine.device) for name, tensor in tensors.items()}))
        engine.backward(loss)
        engine.step()


def save(
    case: Case, engine: Any, savers: dict[str, Saver], out: Path, facts: Facts, client_state: dict[str, Any]
) -> None:
    """Save through every saver, then through DeepSpeed."""
    for policy, saver in savers.items():
        facts["saves"][policy][engine.global_steps] = saved(saver.save(client_state=client_state))
    with plainly(engine):
        engine.save_checkpoint(
            str(case.folder(out)),
            tag=f"global_step{engine.global_steps}",
            client_state=client_state,
            exclude_frozen_parameters=case.scenario.exclude_frozen,
        )


@contextmanager
def counted_stagings() -> Iterator[Counter[str]]:
    """Count the objects that are read and staged, by kind."""
    real, found = Staging.object, Counter[str]()

    def staged(staging: Staging, source: ObjectSource, *rest: Any) -> StoredObject:
        found[str(source.kind)] += 1
        return real(staging, source, *rest)

    with patch.object(Staging, "object", staged):
        yield found


if __name__ == "__main__":
    main()
