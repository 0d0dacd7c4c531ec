"""Train with torchtitan's own containers and checkpoint manager, on CPU ranks, with a store behind the manager.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 -m tests.live.torchtitan_store --out OUT

Its trainer wants CUDA, so the loop is our own; its model states, optimizers, schedules and saves are torchtitan's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager

import layerstore
from layerstore.dcp import StoreReader, StoreWriter

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


class StoreCheckpoints(CheckpointManager):  # type: ignore[misc]  # torchtitan is not installed with the tests
    """torchtitan's manager with a store behind it; the guide shows it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """As torchtitan's, and where the store is."""

        store: str
        run: str

    def __init__(self, config: Config, **others: Any) -> None:
        """Note where the store is."""
        super().__init__(config, **others)
        self.store, self.run = config.store, config.run

    def dcp_save(self, state_dict: Any, checkpoint_id: str, async_mode: str, *_: Any, **__: Any) -> Any:
        """Save to the store."""
        writer = StoreWriter(self.store, run=self.run, step=int(checkpoint_id.rpartition("step-")[2]))
        if async_mode == "disabled":
            return save(state_dict, storage_writer=writer)
        return async_save(state_dict, storage_writer=writer, process_group=self.pg)

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load the run's newest commit, or *step*; without one, what torchtitan loads at the first launch."""
        try:
            with layerstore.open(self.store) as store:
                runs = store.runs()
        except layerstore.NoStore:
            runs = []  # the first launch
        if self.run not in runs:
            return bool(super()._load(step))
        states = self._states_to_load(model_only=False)
        load(states, storage_reader=StoreReader(self.store, self.run if step == -1 else f"{self.run}@{step}"))
        self.states["model"].load_state_dict(states)
        return True


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
    manager = StoreCheckpoints.Config(
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
