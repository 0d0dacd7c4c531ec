"""Train on real DeepSpeed ranks, or resume such trainings from their store and train them to the end.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.live.resuming --out OUT [--all]
    python -m torch.distributed.run --nproc-per-node W -m tests.live.resuming --out OUT --resume [--all] [--go-wrong] \
        [--from-bucket]

With ``--resume`` a copy of the first training's store lies at ``OUT/store``; with ``--from-bucket`` it is a partial
clone of ``OUT/bucket``, from which the engines are filled straight, but for one. Data are drawn from the process's own
generators, so that a resumed training is the same only if these are. DeepSpeed saves by itself, too, right after the
resume and at the end: ``OUT/checkpoints/<name>``; losses and all else is in ``OUT/<name>.<rank>.json``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

import layerstore
from layerstore.live.resuming import Resumed
from layerstore.live.saver.saver import Saver
from layerstore.storage import ObjectStore
from tests.deepspeed import client_states, models
from tests.deepspeed.scenarios import WORLD_SIZE, Scenario
from tests.deepspeed.training import DTYPES, built_engine
from tests.live.cases import (
    COMPOSITE,
    DAMAGED,
    FROM_CLONE,
    LAST,
    MISFITS,
    ODD,
    RESIZED,
    RESUMPTION_OF,
    RESUMPTIONS,
    TO_STAGE_3,
    USUAL,
    Resumption,
)
from tests.live.tiny import flip, plainly
from tests.live.training import begin, each_of, end, options

Facts = dict[str, Any]

SEED = 7


def main() -> None:
    """Run what the command line asks for; at other world sizes only a sample."""
    asked = options("--resume", "--all", "--go-wrong", "--from-bucket")
    if asked.from_bucket:
        os.environ["LAYERSTORE_CACHE_DIR"] = str(asked.out / "cache")
    begin(asked.out)
    is_other_size = asked.resume and dist.get_world_size() != WORLD_SIZE and torch.cuda.device_count() != 1
    sample = [RESUMPTION_OF[name] for name in RESIZED]
    act = train_on if asked.resume else train
    each_of(sample if is_other_size else RESUMPTIONS if asked.all else USUAL, act, asked.out)
    if asked.go_wrong:
        go_wrong(asked.out)
        change_stage(asked.out)
    end()


def train(each: Resumption, engine: Any, out: Path, facts: Facts) -> None:
    """Train *engine* to the end, and save every step while it trains."""
    seed(SEED)
    client_state = client_states.initial(each.scenario.client_state)
    with attached(each, engine, out) as saver:
        save(each, engine, saver, out, client_state)
        facts["trace"] = steps(each, engine, saver, out, client_state)


def train_on(each: Resumption, engine: Any, out: Path, facts: Facts) -> None:
    """Resume *engine* in the middle, and do all that :func:`train` does from there on; the composite is mixed."""
    seed(100 * SEED)
    policy = "parity" if each.name == COMPOSITE else "latest"
    bucket = out / "bucket"
    source = f"file://{bucket}" if bucket.exists() and each.name != FROM_CLONE else out / "store"
    with patch.object(ObjectStore, "read", autospec=True, side_effect=ObjectStore.read) as read:
        found = layerstore.resume(engine, source, run=each.name, step=each.at, policy=policy)
    assert found is not None
    facts["resumed"], facts["read"] = told(found), [call.args[1].id for call in read.call_args_list]
    save_plainly(each, engine, out, found.client_state)
    if each.name == COMPOSITE:
        with layerstore.attach(engine, out / "store", run=each.name, policy=policy) as saver:
            facts["saves"] = []
            for _ in range(2):
                train_step(each.scenario, engine)
                facts["saves"].append(asdict(saver.save()))
        return
    with attached(each, engine, out) as saver:
        facts["trace"] = steps(each, engine, saver, out, found.client_state)


def go_wrong(out: Path) -> None:
    """Try to resume from what cannot be resumed from."""
    each = RESUMPTION_OF[ODD]
    with built_engine(each.scenario) as engine:
        facts = stumble(each, engine, out)
    (out / f"wrong.{dist.get_rank()}.json").write_text(json.dumps(facts))


def change_stage(out: Path) -> None:
    """Resume runs of stages 1 and 2 under stage 3, and one of stage 3 under stage 2."""
    facts: Facts = {}
    for name in TO_STAGE_3:
        each = RESUMPTION_OF[name]
        with built_engine(replace(each.scenario, zero={}, zero_init=False)) as engine:
            found = layerstore.resume(engine, out / "store", run=name, step=each.at)
            assert found is not None
            facts[name] = [train_step(each.scenario, engine)["loss"] for _ in range(engine.global_steps, LAST)]
    each = RESUMPTION_OF[ODD]
    with built_engine(replace(each.scenario, zero={"stage": 2})) as engine:
        facts[ODD] = attempt(engine, out / "store", run=ODD, step=each.at)
    (out / f"stages.{dist.get_rank()}.json").write_text(json.dumps(facts))


def attempt(engine: Any, store: Path, **named: Any) -> str:
    """Return how a resume is refused."""
    try:
        found = layerstore.resume(engine, store, **named)
    except Exception as exc:  # noqa: BLE001  # which one it is, is what the test wants to know
        return f"{type(exc).__name__}: {exc}"
    return "resumed" if found else "None"


def stumble(each: Resumption, engine: Any, out: Path) -> Facts:
    """Train *engine* as :func:`train` does, but try to resume after the first step from what is not a good."""
    seed(SEED)
    trace = [train_step(each.scenario, engine)]

    store = out / "store"
    said = {
        "empty": attempt(engine, store, run="none-such"),
        "must exist": attempt(engine, store, run="none-such", must_exist=True),
        "unknown step": attempt(engine, store, run=each.name, step=77),
        "unknown policy": attempt(engine, store, run=each.name, policy="none-such"),
        "no store": attempt(engine, out / "none-such", run=each.name),
    }
    said |= {f"run {name}": attempt(engine, store, run=name, step=1) for name in MISFITS}
    for damage in DAMAGED:
        said[damage] = attempt(engine, damaged(out, each.name, damage), run=each.name, step=1)
    trace += [train_step(each.scenario, engine) for _ in range(engine.global_steps, LAST)]
    return {"said": said, "trace": trace}


def damaged(out: Path, run: str, damage: str) -> Path:
    """Return a copy of the store in which one object of the last rank's has a flipped byte."""
    copy = out / f"damaged {damage}"
    if dist.get_rank() == 0:
        shutil.copytree(out / "store", copy)
        flip(copy, run, damage, rank=dist.get_world_size() - 1)
    dist.barrier()
    return copy


def told(found: Resumed) -> Facts:
    """Return what a resume tells, for a file; what the user's state holds is compared through DeepSpeed's own saves."""
    return {**asdict(found), "client_state": sorted(found.client_state)}


def seed(number: int) -> None:
    """Set all generators, each rank's to others."""
    own = number + dist.get_rank()
    random.seed(own)
    np.random.seed(own)
    torch.manual_seed(own)


def attached(each: Resumption, engine: Any, out: Path) -> Saver:
    """Attach a saver that writes the run."""
    return layerstore.attach(
        engine, out / "store", run=each.name, frozen="exclude" if each.scenario.exclude_frozen else "once"
    )


def steps(each: Resumption, engine: Any, saver: Saver, out: Path, client_state: Facts) -> list[Facts]:
    """Train to the last step, save each, and return what each was like."""
    trace = []
    for _ in range(engine.global_steps, LAST):
        trace.append(train_step(each.scenario, engine))
        client_states.advance(client_state)
        save(each, engine, saver, out, client_state)
    return trace


def save(each: Resumption, engine: Any, saver: Saver, out: Path, client_state: Facts) -> None:
    """Save through *saver*, and at the steps that are compared by DeepSpeed as well."""
    saver.save(client_state=client_state)
    if engine.global_steps in {each.at, LAST, *each.compared}:
        save_plainly(each, engine, out, client_state)


def save_plainly(each: Resumption, engine: Any, out: Path, client_state: Facts) -> None:
    """Let DeepSpeed save the engine."""
    with plainly(engine):
        engine.save_checkpoint(
            str(each.folder(out)),
            tag=f"global_step{engine.global_steps}",
            client_state=client_state,
            exclude_frozen_parameters=each.scenario.exclude_frozen,
        )


def train_step(scenario: Scenario, engine: Any) -> Facts:
    """Do one update; return what decides whether two trainings are the same, floats to the last bit."""
    loss = models.loss_of(engine(**drawn(scenario, engine.device)))
    engine.backward(loss)
    engine.step()
    return {
        "step": engine.global_steps,
        "loss": float(loss.detach()).hex(),
        "grad_norm": float(engine.get_global_grad_norm()).hex(),
        "learning_rates": [float(rate).hex() for rate in engine.get_lr()],
        "skipped": engine.skipped_steps,
        "samples": engine.global_samples,
        "scale": float(getattr(engine.optimizer, "loss_scale", 1.0)).hex(),
    }


def drawn(scenario: Scenario, device: torch.device) -> models.Batch:
    """Return a batch that nobody can know without the state of all generators."""
    if scenario.model in {"llama", "tied_llama"}:
        tokens = torch.randint(0, models.VOCABULARY, (2, 16))
        tokens[:, 0] = random.randrange(models.VOCABULARY)
        tokens[:, 1] = int(np.random.randint(models.VOCABULARY))
        return {"input_ids": tokens.to(device), "labels": tokens.to(device)}
    inputs = torch.randn(6, 5) + random.random() + np.random.random()
    inputs = inputs.to(device) + torch.randn(6, 5, device=device)
    dtype = DTYPES[scenario.precision]
    return {"inputs": inputs.to(dtype), "targets": inputs[:, :3].to(dtype)}


if __name__ == "__main__":
    main()
