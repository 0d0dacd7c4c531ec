"""Train the cases on real DeepSpeed ranks, and save each step twice: through a saver, and by DeepSpeed itself.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.live.training --out OUT

``OUT/store`` gets the savers' runs, ``OUT/checkpoints/<case>`` DeepSpeed's folders, ``OUT/<case>.<rank>.json``
what each rank has seen: what was due, what was refused, how much was staged.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

import layerstore
from layerstore.live.saver.results import Saved
from layerstore.live.saver.saver import Saver
from layerstore.model import StoredObject
from layerstore.publish.staging import Staging
from layerstore.store import Store
from layerstore.zero3 import ObjectSource
from tests.deepspeed import client_states, models
from tests.deepspeed.training import DTYPES, allow_fp16, built_engine
from tests.live.cases import CASE_OF, CASES, CPU_ADAM, FUSED_ADAM, POLICIES, Case
from tests.live.plain import plainly
from tests.live.tiny import Faults, fail

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
        facts: Facts = {"unavailable": "", "saves": {}}
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
    faults = Faults()
    client_state = client_states.initial(case.scenario.client_state)
    with (
        counted_stagings() as staged,
        layerstore.attach(
            engine,
            Store(out / "store", hook=faults),
            run=case.name,
            policy=POLICIES[case.policy],
            mode=case.mode,
            frozen="exclude" if case.scenario.exclude_frozen else "once",
        ) as saver,
    ):
        if 0 in case.steps:
            save(case, engine, saver, out, facts, client_state)
        for step in range(1, case.steps[-1] + 1):
            train_step(case, engine, step, saver, facts)
            client_states.advance(client_state)
            if dist.get_world_size() > 1:  # all of it is about ranks that differ
                if case.misuse == "refused" and step == 2:
                    facts["refused"] = {name: attempt(action) for name, action in refusals(saver).items()}
                if case.misuse == "given_up" and step in {1, 2}:
                    give_up(saver, step, faults, facts)
            if step in case.steps:
                save(case, engine, saver, out, facts, client_state)
    facts["staged"] = staged
    facts["skipped_steps"] = engine.skipped_steps
    facts["status"] = asdict(saver.status())


def train_step(case: Case, engine: Any, step: int, saver: Saver, facts: Facts) -> None:
    """Do one update; try to save before the last of its batches."""
    for batch in range(case.accumulated):
        if batch:
            facts.setdefault("off_boundary", []).append(attempt(saver.save))
        tensors = models.batch(
            case.scenario.model, step=10 * step + batch, rank=dist.get_rank(), dtype=DTYPES[case.scenario.precision]
        )
        loss = models.loss_of(engine(**{name: tensor.to(engine.device) for name, tensor in tensors.items()}))
        engine.backward(loss)
        engine.step()


def save(case: Case, engine: Any, saver: Saver, out: Path, facts: Facts, client_state: dict[str, Any]) -> None:
    """Save through the saver, then through DeepSpeed."""
    facts["saves"][engine.global_steps] = asdict(saver.save(client_state=client_state))
    with plainly(engine):
        engine.save_checkpoint(
            str(case.folder(out)),
            tag=f"global_step{engine.global_steps}",
            client_state=client_state,
            exclude_frozen_parameters=case.scenario.exclude_frozen,
        )


# -- what training programs do wrong, and what disks do to them ------------------------------------------------------


def attempt(action: Callable[[], Saved]) -> Facts:
    """Return what *action* gives, or how it is refused."""
    try:
        return asdict(action())
    except Exception as exc:  # noqa: BLE001  # which one it is, is what the test wants to know
        return {"error": type(exc).__name__, "message": str(exc)}


def refusals(saver: Saver) -> dict[str, Callable[[], Saved]]:
    """Return saves that no rank may begin, each of them wrong on the last rank or on all."""
    rank = dist.get_rank()
    is_wrong = rank == dist.get_world_size() - 1
    odd = {"epoch": {"best": [1, object()]}}
    return {
        "object": lambda: saver.save(client_state=odd if is_wrong else {}),
        "steps": lambda: saver.save(100 + rank),
        "extra_files": lambda: saver.save(extra_files={"tokenizer.json": "no/such/file"}),
        "going_back": lambda: saver.save(0),
        "pin": lambda: saver.save(pin=7 if is_wrong else None),  # type: ignore[arg-type]
        "twice": lambda: twice(saver),
    }


def twice(saver: Saver) -> Saved:
    """Save the same step two times; return what the second one says if it is what the first one said."""
    first, second = saver.save(), saver.save()
    assert first == second, f"{first} is not {second}"
    return second


def give_up(saver: Saver, step: int, faults: Faults, facts: Facts) -> None:
    """Save steps 1 and 2, of which the last rank fails to write the first: the second begins before that is known."""
    if step == 1:
        saver.wait()
        goes_on = threading.Event()

        def refuse(path: Path) -> None:
            goes_on.wait()
            faults.clear()
            fail(errno.EIO)(path)

        faults.on("write", "/tmp/", refuse, rank=1)
        facts["goes_on"] = goes_on
    facts["saves"][step] = asdict(saver.save())
    if step == 2:
        facts.pop("goes_on").set()
        saver.wait()
        facts["status_given_up"] = asdict(saver.status())


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
