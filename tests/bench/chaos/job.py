"""
A short training under ZeRO-3 that resumes from whatever is in its folder: the job that ckpt-chaos kills.

    python -m tests.bench.chaos.job --saver layerstore --out DIR

It saves every few steps, finds its newest save by itself when it is started again, and at the end writes its masters
and moments to ``DIR/final.pt``. Run alone it is a job of one rank; RANK and WORLD_SIZE make it one of several.
"""

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

import layerstore
from tests.ranks.launch import cpu_environment
from tests.ranks.llama import build_engine, train

SAVERS = ("deepspeed", "layerstore", "layerstore-async")
STEPS = 12
SAVE_EVERY = 3
RUN = "chaos"

Engine = Any  # deepspeed ships no types


def main() -> None:
    """Resume, train to the end, and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saver", choices=SAVERS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    _join()
    engine = build_engine(layers=2, hidden=32)
    job = _with_deepspeed if options.saver == "deepspeed" else _with_layerstore
    job(engine, options.out, is_async=options.saver.endswith("async"))
    _write_result(engine, options.out / "final.pt")
    sys.stdout.flush()
    os._exit(0)  # taking down threads of torch and gloo now and then aborts the process


def _join() -> None:
    """Become a rank of the job."""
    os.environ |= cpu_environment()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free.getsockname()[1]}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, str(value))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")


def _with_deepspeed(engine: Engine, out: Path, *, is_async: bool) -> None:
    """Let DeepSpeed save and load, as its own guide does."""
    assert not is_async
    if (out / "latest").exists():
        engine.load_checkpoint(str(out))
    print(f"resumed from step {engine.global_steps}", flush=True)
    train(engine, steps=STEPS, out=out, saves=range(SAVE_EVERY, STEPS, SAVE_EVERY))


def _with_layerstore(engine: Engine, out: Path, *, is_async: bool) -> None:
    """Let a saver of this project save, and resume from its store."""
    import torch.distributed as dist

    path = out / "store"
    if dist.get_rank() == 0 and not (path / "store.json").exists():
        layerstore.init(path).close()
    dist.barrier()
    layerstore.resume(engine, path, run=RUN)
    print(f"resumed from step {engine.global_steps}", flush=True)
    with layerstore.attach(engine, path, run=RUN, mode="async" if is_async else "sync") as saver:
        while engine.global_steps < STEPS:
            train(engine, steps=min(engine.global_steps + SAVE_EVERY, STEPS), out=out, saves=())
            if engine.global_steps < STEPS:
                saver.save()


def _write_result(engine: Engine, path: Path) -> None:
    """Write the masters and moments of this rank; the first rank's file is what ckpt-chaos compares."""
    import torch
    import torch.distributed as dist

    zero = engine.optimizer
    states = [zero.optimizer.state[flat] for flat in zero.fp32_partitioned_groups_flat]
    result = [*zero.fp32_partitioned_groups_flat, *(state[kind] for state in states for kind in sorted(state))]
    whole = [part.detach().clone() if torch.is_tensor(part) else torch.tensor(part) for part in result]
    if dist.get_rank() == 0:
        torch.save(whole, path)
    dist.barrier()


if __name__ == "__main__":
    main()
