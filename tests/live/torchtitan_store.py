"""Train with torchtitan's own containers and checkpoint manager, on CPU ranks, with a store behind the manager.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 -m tests.live.torchtitan_store --out OUT

Its trainer wants CUDA, so the loop is our own; its model states, optimizers, schedules and saves are torchtitan's.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

MANAGER = Path(__file__).parents[2] / "docs" / "examples" / "with_torchtitan.py"

STEPS, LEFT_AT, SAVE_STEPS = 6, 3, 2


def main() -> None:
    """Train without a stop, then until one, then on, in both modes of saving that need no CUDA."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    out: Path = parser.parse_args().out
    dist.init_process_group("gloo")
    for mode in ("disabled", "async"):
        whole = job(out, mode, steps=STEPS, saves=False)
        left = job(out, mode, steps=LEFT_AT)
        resumed = job(out, mode, steps=STEPS)
        if dist.get_rank() == 0:
            losses = {"whole": whole, "left": left, "resumed": resumed}
            (out / f"{mode}.json").write_text(json.dumps(losses))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


class TrainState:
    """The trainer's own count, which torchtitan keeps under ``train_state``."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.step = int(state["step"])


def job(out: Path, mode: str, *, steps: int, saves: bool = True) -> list[list[Any]]:
    """Train up to *steps*, from the newest save if there is one; return step and loss of each."""
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    config = default_adamw(lr=1e-2)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=STEPS)
    state = TrainState()
    store_checkpoints = runpy.run_path(str(MANAGER))["StoreCheckpoints"]
    manager = store_checkpoints.Config(
        enable=True,
        store=str(out / "store"),
        run=mode,
        interval=SAVE_STEPS,
        async_mode=mode,
        last_save_model_only=False,
        keep_latest_k=0,
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": state},
        sd_adapter=None,
    )
    del manager.states["dataloader"]
    if saves:
        manager.load()
    seen = []
    while state.step < steps:
        state.step += 1
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(state.step + 100 * dist.get_rank()))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedules.step()
        optimizers.zero_grad()
        seen.append([state.step, float(loss.detach()).hex()])
        if saves:
            manager.save(state.step)
    manager.maybe_wait_for_saving()
    return seen


if __name__ == "__main__":
    main()
