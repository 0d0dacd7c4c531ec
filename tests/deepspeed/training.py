"""Train the scenarios with real DeepSpeed ZeRO-3 on CPU ranks, from the start or from checkpoints: one launch for all.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.deepspeed.training --out OUT [--scenario NAME ...] \
        [--resume-from DIR [--step N] [--until N] [--universal]]

With ``--resume-from`` every engine first loads the checkpoint of step N from ``DIR/<scenario>`` through DeepSpeed's own
loader and saves it at once, unchanged: what lies in ``OUT/<scenario>`` then is what DeepSpeed itself makes of it on so
many ranks. Then it trains on. ``OUT/<scenario>/trace.jsonl`` has each step's losses (one per rank), gradient norm and
learning rates, floats as ``float.hex()``, so that equal text means equal bits.

Checked by hand, not in every test run: resumed from the *source* checkpoints themselves, every scenario that
``resumes_alike`` has the same traces, and the same tensors at step 4. A difference that the tests see is therefore
ours. The others are also resumed from their own checkpoints: a composite of theirs is compared with that.

All scenarios share one process per rank: an engine is destroyed, and DeepSpeed's counter of parameters reset,
before the next is built, so that a scenario's files do not depend on which ones ran before it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init

from tests.deepspeed import client_states, models
from tests.deepspeed.poke import poked_copy
from tests.deepspeed.scenarios import (
    FROM_SHARDS_FOLDER,
    POKED,
    POKED_FOLDER,
    RESUME_STEP,
    SAVE_STEPS,
    SCENARIO_OF,
    SCENARIOS,
    STEPS,
    WORLD_SIZE,
    Grouping,
    Scenario,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "autocast": torch.float32}

Engine = Any  # deepspeed ships no types
ParamGroup = dict[str, Any]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--step", type=int, default=RESUME_STEP, help="of the checkpoints to resume from")
    parser.add_argument("--until", type=int, default=STEPS, help="the last step to train")
    parser.add_argument("--universal", action="store_true", help="resume from Universal Checkpoints")
    parser.add_argument("--under-stage-3", action="store_true", help="train under it, whatever the scenario says")
    parser.add_argument("--scenario", action="append", choices=sorted(SCENARIO_OF))
    arguments = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    allow_fp16()
    chosen = [SCENARIO_OF[name] for name in arguments.scenario] if arguments.scenario else SCENARIOS
    for each in chosen:
        scenario = replace(each, zero={}, zero_init=False) if arguments.under_stage_3 else each
        if dist.get_rank() == 0:
            print(f"=== {scenario.name}", flush=True)
        with built_engine(scenario, universal=arguments.universal) as engine:
            if arguments.resume_from is None:
                train(scenario, engine, out=arguments.out)
            else:
                resume(scenario, engine, arguments.resume_from, arguments.step, arguments.until, out=arguments.out)
        if arguments.resume_from is None and not scenario.resumes_alike:
            with built_engine(scenario) as engine:
                resume(scenario, engine, arguments.out, RESUME_STEP, STEPS, out=arguments.out / FROM_SHARDS_FOLDER)
    dist.barrier()
    if dist.get_rank() == 0 and arguments.resume_from is None:
        write_poked_copies(arguments.out, {scenario.name for scenario in chosen})
    dist.barrier()
    sys.stdout.flush()
    # All is written. Taking down the threads of torch and gloo now and then aborts the process,
    # which would make good training look failed.
    os._exit(0)


def write_poked_copies(out: Path, trained: set[str]) -> None:
    """Copy some of the *trained* checkpoints with bit patterns that training does not reach."""
    for name in sorted(trained.intersection(POKED)):
        scenario = SCENARIO_OF[name]
        shards = scenario.tag_dir(out / POKED_FOLDER, step=RESUME_STEP)
        poked_copy(scenario.tag_dir(out, step=RESUME_STEP), shards, world_size=WORLD_SIZE)
        (shards.parent / "latest").write_text(shards.name)


def allow_fp16() -> None:
    """Let DeepSpeed train in fp16 on any CPU.

    It asks whether the processor has fp16 instructions. torch computes in fp16 without them, only slowly,
    and the files do not depend on the answer.
    """
    get_accelerator().is_fp16_supported = lambda: True


def resume(scenario: Scenario, engine: Engine, source: Path, step: int, until: int, *, out: Path) -> None:
    """Load the checkpoint of *step* below *source*, save it again into *out*, and train *engine* to *until*."""
    _, loaded = engine.load_checkpoint(
        str(scenario.save_dir(source, step=step)),
        tag=None if engine.load_universal_checkpoint() else scenario.tag(step=step),
        load_module_strict=not scenario.exclude_frozen,
    )
    # DeepSpeed warns and starts from scratch when it finds nothing: that would look like a wrong trajectory.
    assert engine.global_steps == step, f"{scenario.name}: nothing was loaded from {source}"
    client_state = {key: loaded[key] for key in client_states.initial(scenario.client_state)}
    save(scenario, engine, client_state, step=step, out=out)
    train(scenario, engine, out=out, until=until, client_state=client_state)


def train(
    scenario: Scenario, engine: Engine, *, out: Path, until: int = STEPS, client_state: dict[str, Any] | None = None
) -> None:
    """Train *engine* to the step *until*."""
    client_state = client_states.initial(scenario.client_state) if client_state is None else client_state
    trace = out / scenario.name / "trace.jsonl"
    trace.parent.mkdir(parents=True, exist_ok=True)
    for step in range(engine.global_steps + 1, until + 1):
        entry = train_step(scenario, engine, step=step)
        if dist.get_rank() == 0:
            with trace.open("a") as lines:
                lines.write(json.dumps(entry) + "\n")
        client_states.advance(client_state)
        if step in SAVE_STEPS:
            save(scenario, engine, client_state, step=step, out=out)


def save(scenario: Scenario, engine: Engine, client_state: dict[str, Any], *, step: int, out: Path) -> None:
    """Save a checkpoint of *engine*, which is at *step*."""
    engine.save_checkpoint(
        str(scenario.save_dir(out, step=step)),
        tag=scenario.tag(step=step),
        client_state=client_state,
        exclude_frozen_parameters=scenario.exclude_frozen,
    )


def train_step(scenario: Scenario, engine: Engine, *, step: int) -> dict[str, Any]:
    """Do one optimizer step and return its entry of the trace."""
    batch = models.batch(scenario.model, step=step, rank=dist.get_rank(), dtype=DTYPES[scenario.precision])
    loss = models.loss_of(engine(**batch))
    engine.backward(loss)
    engine.step()
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, float(loss.detach()).hex())
    return {
        "step": step,
        "losses": losses,
        "grad_norm": float(engine.get_global_grad_norm()).hex(),
        "learning_rates": [float(rate).hex() for rate in engine.get_lr()],
        "skipped": engine.skipped_steps,
    }


@contextmanager
def built_engine(scenario: Scenario, *, universal: bool = False) -> Iterator[Engine]:
    """Build the scenario's engine, and take it down so that the next one finds a clean process."""
    # The counter's values are written into the files (ds_id): start every scenario at the same one.
    Init.param_id = 0
    torch.manual_seed(0)
    config = engine_config(scenario) | ({"checkpoint": {"load_universal": True}} if universal else {})
    partitioned: AbstractContextManager[Any] = (
        Init(config_dict_or_path=config) if scenario.zero_init and scenario.stage == 3 else nullcontext()
    )
    with partitioned:
        module = models.build(scenario.model)
    for name, parameter in module.named_parameters():
        parameter.requires_grad = not name.startswith(scenario.frozen) if scenario.frozen else True
    groups = param_groups(module, scenario.grouping)
    optimizer = build_optimizer(scenario, groups)
    scheduler = None
    if scenario.scheduler == "torch" and optimizer is not None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=groups if optimizer is None else None,
        lr_scheduler=scheduler,
        config=config,
    )
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, module, optimizer, scheduler, groups
        gc.collect()


def engine_config(scenario: Scenario) -> dict[str, Any]:
    """Return DeepSpeed's config for *scenario*."""
    settings: dict[str, dict[str, Any]] = {
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {},  # the scaler's settings are the scenario's own
        "fp32": {},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": scenario.clipping,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, **scenario.zero},
        **settings[scenario.precision],
        **scenario.config,
    }


def build_optimizer(scenario: Scenario, groups: list[ParamGroup]) -> torch.optim.Optimizer | None:
    """Return the scenario's optimizer over *groups*, or None where DeepSpeed builds its own."""
    if scenario.optimizer == "configured":
        return None
    if scenario.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3, amsgrad=scenario.optimizer == "amsgrad")


def param_groups(module: torch.nn.Module, grouping: Grouping) -> list[ParamGroup]:
    """Return the trainable parameters of *module*, dealt out as *grouping* says."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if grouping == "single":
        return [{"params": [parameter for _, parameter in named]}]
    keys: dict[tuple[Any, ...], list[torch.nn.Parameter]] = {}
    for name, parameter in named:
        keys.setdefault(group_key(name, parameter, grouping), []).append(parameter)
    # The last part of a key is the decay flag: the same for a parameter in every grouping.
    return [{"params": keys[key], "weight_decay": 0.1 if key[-1] else 0.0} for key in sorted(keys)]


def group_key(name: str, parameter: torch.nn.Parameter, grouping: Grouping) -> tuple[Any, ...]:
    """Return the sort key of the param group that *name* belongs to."""
    decays = "norm" not in name and not name.endswith("bias")
    if grouping == "decay":
        return (not decays, decays)
    block = re.search(r"layers\.(\d+)\.", name)
    auxiliary_rank = 0 if grouping == "auxiliary_first" else 2
    if block is None:
        return (auxiliary_rank, 0, name, decays)
    return (1, int(block.group(1)), "", decays)


if __name__ == "__main__":
    main()
