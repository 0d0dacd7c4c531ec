"""
Train as a job that a queue may end: at SIGTERM it saves once more and fails, so that it is queued again and goes on.

    torchrun --nproc-per-node 2 with_slurm.py --store runs/store --steps 8

The batch script around it is in the guide to Slurm.
"""

import argparse
import signal

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import layerstore  # layerstore

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}
SIGNALS: list[int] = []


def main() -> None:
    """Train for as many steps as the command line says, or until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--bucket")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    signal.signal(signal.SIGTERM, lambda number, _: SIGNALS.append(number))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=99, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)

    layerstore.resume(engine, options.store, run="slurm")  # layerstore: nothing at the first launch
    with layerstore.attach(engine, options.store, run="slurm", push=options.bucket) as saver:  # layerstore
        for step in range(engine.global_steps + 1, options.steps + 1):
            tokens = batch(step, engine.global_rank).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"step {step}: {loss.item()}", flush=True)
            is_last = stopped(tokens.device)
            if step % 2 == 0 or is_last:
                saver.save()  # layerstore
            if is_last:
                break
    if engine.global_steps < options.steps:
        raise SystemExit(f"stopped after step {engine.global_steps}: the next launch goes on from there")


def stopped(device: torch.device) -> bool:
    """Return whether a signal has come to any rank: all of them must end after the same step."""
    heard = torch.tensor(len(SIGNALS), device=device)
    dist.all_reduce(heard)
    return bool(heard)


def batch(step: int, rank: int) -> torch.Tensor:
    """Return what *rank* learns at *step*."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (2, 16), generator=generator)


if __name__ == "__main__":
    main()
