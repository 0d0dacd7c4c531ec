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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist

import layerstore
from layerstore.live.saver.results import Saved
from layerstore.live.saver.saver import Saver
from layerstore.model import StoredObject
from layerstore.staging import Staging
from layerstore.store import Store
from layerstore.zero3 import ObjectSource
from tests.deepspeed import client_states, models
from tests.deepspeed.training import DTYPES, allow_fp16, built_engine
from tests.live.cases import CASES, CHANGED_AT, COMPILED, POLICIES, Case, OfScenario
from tests.live.tiny import Faults, fail, plainly

Facts = dict[str, Any]
T = TypeVar("T", bound=OfScenario)


def main() -> None:
    """Run all cases."""
    out = options().out
    begin(out)
    each_of(CASES, run_case, out)
    end()


def options(*flags: str) -> argparse.Namespace:
    """Return what the command line says: ``--out``, and *flags* of the program's own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()


def each_of(cases: Iterable[T], run: Callable[[T, Any, Path, Facts], None], out: Path) -> None:
    """Let *run* train an engine of each of *cases*; leave the facts that it notes."""
    allow_fp16()
    for case in cases:
        if dist.get_rank() == 0:
            print(f"=== {case.name}", flush=True)
        facts: Facts = {"unavailable": "", "saves": {}}
        try:
            with built_engine(case.scenario) as engine:
                run(case, engine, out, facts)
        except RuntimeError as exc:
            # No compiler, or one that is too old: that is not a fault of ours.
            if case.name not in COMPILED or "extension" not in str(exc):
                raise
            facts["unavailable"] = str(exc)
        case.facts(out, dist.get_rank()).write_text(json.dumps(facts))


def begin(out: Path) -> None:
    """Join the ranks, and make a store that all of them see if there is none."""
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() == 0 and not (out / "store").exists():
        layerstore.init(out / "store").close()
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
            if case.misuse == "frozen_changed" and step == CHANGED_AT:
                change_frozen(engine)
            if step in case.steps:
                save(case, engine, saver, out, facts, client_state)
        if case.misuse == "own_save":
            engine.load_checkpoint(str(out / "pointers"), load_module_strict=False)
    if case.policy == "drift":
        layerstore.resume(engine, out / "store", run=case.name)
        with layerstore.attach(engine, out / "store", run=case.name, policy=POLICIES[case.policy]) as again:
            train_step(case, engine, case.steps[-1] + 1, again, facts)
            again.save()
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
    """Save through the saver, in the end maybe by the engine's own call, then by DeepSpeed."""
    if case.misuse == "own_save" and engine.global_steps == case.steps[-1]:
        engine.save_checkpoint(str(out / "pointers"), client_state=client_state)
        facts["saves"][engine.global_steps] = {"number": saver._schedule.number - 1, "layers_due": []}
    else:
        gathered = gathered_names(engine)
        facts["saves"][engine.global_steps] = asdict(saver.save(client_state=client_state))
        assert gathered_names(engine) == gathered  # anything else would take collectives
    with plainly(engine):
        engine.save_checkpoint(
            str(case.folder(out)),
            tag=f"global_step{engine.global_steps}",
            client_state=client_state,
            exclude_frozen_parameters=case.scenario.exclude_frozen,
        )


def gathered_names(engine: Any) -> set[str]:
    """Return the names of the parameters that are whole on this rank."""
    return {name for name, parameter in engine.module.named_parameters() if parameter.numel()}


def change_frozen(engine: Any) -> None:
    """Change a frozen parameter as DeepSpeed says that one may."""
    weight = next(parameter for parameter in engine.module.parameters() if not parameter.requires_grad)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.mul_(2)


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
