"""Go on under PyTorch's FSDP2 from distributed checkpoints, on any number of CPU ranks: one launch for all scenarios.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 3 \
        -m tests.deepspeed.fsdp --out OUT --resume-from DIR [--flat] [--scenario NAME ...]

Each module is sharded with ``fully_shard``, loads ``DIR/<scenario>`` with ``torch.distributed.checkpoint`` and saves
it at once, unchanged, into ``OUT/<scenario>/loaded``, and in the Trainer's default form into ``OUT/<scenario>/full``.
Then it trains on with the batches that DeepSpeed's two ranks have, saves into ``OUT/<scenario>/trained``, and leaves
each step's loss in ``OUT/<scenario>/trace.jsonl``. With ``--flat`` the optimizer's state is flattened, as torchtitan
has it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.deepspeed import models
from tests.deepspeed.scenarios import RESUME_STEP, SCENARIO_OF, WORLD_SIZE, Scenario
from tests.deepspeed.training import param_groups

STEPS = 2


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume-from", required=True, type=Path)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--scenario", action="append", required=True, choices=sorted(SCENARIO_OF))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for name in arguments.scenario:
        go_on(SCENARIO_OF[name], arguments.resume_from / name, arguments.out / name, flat=arguments.flat)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in training: taking down gloo's threads now and then aborts the process


def go_on(scenario: Scenario, source: Path, out: Path, *, flat: bool) -> None:
    """Load *source*, save it again, train, and save that."""
    module = sharded(scenario)
    optimizer = torch.optim.AdamW(
        param_groups(module, scenario.grouping), lr=0.5, amsgrad=scenario.optimizer == "amsgrad"
    )
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(module, optimizer, options=options)
    state_dict_loader.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=source)
    set_state_dict(module, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    save(module, optimizer, out / "loaded", options)
    save_full(module, optimizer, out / "full")
    for step in range(RESUME_STEP + 1, RESUME_STEP + STEPS + 1):
        losses = [train_on(scenario, module, step=step, rank=rank) for rank in range(WORLD_SIZE)]
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with (out / "trace.jsonl").open("a") as lines:
                lines.write(json.dumps({"step": step, "losses": losses}) + "\n")
    save(module, optimizer, out / "trained", options)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, out / "trained.pt")


def sharded(scenario: Scenario) -> Any:
    """Return the scenario's module, with other weights than it was trained from, over all ranks."""
    torch.manual_seed(1)
    module: Any = models.build(scenario.model)
    for name, parameter in module.named_parameters():
        # DeepSpeed keeps no moments of a parameter without elements.
        parameter.requires_grad = not (scenario.frozen and name.startswith(scenario.frozen)) and parameter.numel() > 0
    # BatchNorm takes no weights in half precision beside statistics in single.
    half = torch.bfloat16 if scenario.precision == "bf16" and scenario.model != "norm_statistics" else None
    if scenario.name == "bf16_master":
        module.to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in getattr(getattr(module, "model", module), "layers", []):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def train_on(scenario: Scenario, module: Any, *, step: int, rank: int) -> float:
    """Add the gradients of the batch that DeepSpeed's *rank* has at *step*; return its loss."""
    batch = models.batch(scenario.model, step=step, rank=rank, dtype=torch.float32)
    loss = models.loss_of(module(**batch))
    (loss / WORLD_SIZE).backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def save(module: Any, optimizer: torch.optim.Optimizer, out: Path, options: StateDictOptions) -> None:
    """Save both as PyTorch's own examples do."""
    model_state, optimizer_state = get_state_dict(module, optimizer, options=options)
    state_dict_saver.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=out)


def save_full(module: Any, optimizer: torch.optim.Optimizer, out: Path) -> None:
    """Save whole tensors into two files, as Accelerate's FULL_STATE_DICT."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(module, optimizer, options=options)
    if dist.get_rank() == 0:
        out.mkdir()
        torch.save(model_state, out / "pytorch_model_fsdp.bin")
        torch.save(optimizer_state, out / "optimizer.bin")


if __name__ == "__main__":
    main()
