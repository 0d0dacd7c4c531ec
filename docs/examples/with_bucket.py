"""
Train on a machine that may be gone tomorrow: each save goes to a bucket, and another machine goes on from there.

    deepspeed --num_gpus 2 with_bucket.py --store /dev/shm/sft --bucket s3://checkpoints/sft --steps 8

On the other machine the same line goes on: what its own store lacks is read from the bucket.
"""

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerstore  # layerstore

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    """Train for as many steps as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=99, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)

    levels = [options.store, options.bucket]
    layerstore.resume(engine, levels, run="bucket")  # layerstore: nothing at the first launch
    keep = layerstore.Keep(last=2)  # layerstore: on this machine; the bucket keeps all
    with layerstore.attach(engine, levels, run="bucket", keep=keep) as saver:  # layerstore
        for step in range(engine.global_steps + 1, options.steps + 1):
            tokens = batch(step, engine.global_rank).to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0:
                print(f"step {step}: {loss.item()}", flush=True)
            if step % 2 == 0:
                saver.save()  # layerstore


def batch(step: int, rank: int) -> torch.Tensor:
    """Return what *rank* learns at *step*."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (2, 16), generator=generator)


if __name__ == "__main__":
    main()
