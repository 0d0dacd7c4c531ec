"""Train real DeepSpeed ranks that save at every step, while copies and writes of earlier saves still run.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.live.asynchronous --out OUT

Each course saves through a saver and, for comparison, by DeepSpeed itself: ``OUT/store`` and ``OUT/checkpoints``.
``OUT/<course>.<rank>.json`` says how often an update found copies that were not finished.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn

import layerstore
from layerstore.disk import stream
from layerstore.live.saver.saver import Saver
from layerstore.staging import stage
from layerstore.store import Store
from tests.live.cases import COURSES, Course
from tests.live.tiny import plainly
from tests.live.training import begin, end, options

WIDTH = 240

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 3},
}


class Blocks(nn.Module):
    """Four blocks, whose masters and moments take more than a megabyte of each rank."""

    def __init__(self) -> None:
        """Build the module."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return what the model is trained to make small."""
        hidden = inputs
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden.float().square().mean()


def main() -> None:
    """Run all courses."""
    out = options().out
    begin(out)
    # So small a model would be in memory as a whole, and never wait for the disk.
    vars(stream)["STREAM_BYTES"] = 1 << 16
    vars(stage)["SMALL_OBJECT_BYTES"] = 0
    for course in COURSES:
        Init.param_id = 0
        torch.manual_seed(0)
        with Init(config_dict_or_path=CONFIG):
            module = Blocks()
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2), config=CONFIG
        )
        facts = run_course(course, engine, out)
        course.facts(out, dist.get_rank()).write_text(json.dumps(facts))
        engine.destroy()
        del engine, module
        gc.collect()
    end()


def run_course(course: Course, engine: Any, out: Path) -> dict[str, Any]:
    """Train *engine* as *course* says; return what this rank has seen."""
    held: list[bool] = []
    is_disk_free = threading.Event()
    skipped: list[int] = []
    gate = Saver._gate

    def seen_gate(saver: Saver) -> None:
        held.append(any(not job.snapshot.copied.is_set() for job in saver._jobs))
        if not course.is_stuck:
            is_disk_free.set()
        if course.is_gated:
            gate(saver)

    def slow(operation: str, path: Path) -> None:
        if operation == "write" and course.write_seconds:
            is_disk_free.wait()
            time.sleep(course.write_seconds)

    with (
        patch.object(Saver, "_gate", seen_gate),
        layerstore.attach(
            engine,
            Store(out / "store", hook=slow),
            run=course.name,
            host_buffer=course.host_buffer,
            on_pressure=course.on_pressure,
        ) as saver,
    ):
        for step in range(1, course.steps + 1):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            inputs = torch.randn(4, WIDTH, generator=generator).to(engine.device, torch.bfloat16)
            engine.backward(engine(inputs))
            engine.step()
            if saver.save().skipped:
                skipped.append(step)
            is_disk_free.clear()
            if not course.is_stuck:
                with plainly(engine):
                    engine.save_checkpoint(str(course.folder(out)), tag=f"global_step{step}")
        is_disk_free.set()
        saver.wait()
        unresolved = len(saver._jobs)
    return {
        "held": sum(held),
        "updates": len(held),
        "skipped": skipped,
        "unresolved": unresolved,
        "status": asdict(saver.status()),
    }


if __name__ == "__main__":
    main()
