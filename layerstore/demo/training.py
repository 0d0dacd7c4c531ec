"""
Train a tiny Llama with real DeepSpeed ZeRO-3: the program that every rank of the demo runs.

    python -m torch.distributed.run --nproc-per-node 2 -m layerstore.demo.training STEPS OUT [CHECKPOINT ...]

Trains to STEPS from each CHECKPOINT, or from the beginning. OUT gets the losses of all these training runs, and the
saves of the first. The training text is the sources of Python's standard library, byte by byte. A batch depends only
on its step and rank, so the same step sees the same text, interrupted or not.
"""

import json
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import Any

SAVE_EVERY = 2
BATCH, SEQUENCE = 4, 128
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 10}},
}


def main(steps: str, out: str, *checkpoints: str) -> None:
    """Train; SIGTERM ends the process."""
    # Raise on SIGTERM, so that an interrupted compile releases its lock file: the next would wait for that forever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    losses = []
    for number, checkpoint in enumerate(checkpoints or [""]):
        engine = build_engine(seed=number + len(checkpoints))  # a resume must not begin with the first run's weights
        if checkpoint:
            engine.load_checkpoint(checkpoint)
            if engine.global_steps == 0:  # DeepSpeed only warns if it finds nothing, and would train from scratch
                raise SystemExit(f"DeepSpeed loaded nothing from {checkpoint}")
        losses.append(train(engine, steps=int(steps), out=None if number else out))
    if dist.get_rank() == 0:
        Path(out, "losses.json").write_text(json.dumps(losses))
    dist.barrier()
    # Everything is written. Shutting down the threads of torch and gloo occasionally aborts the process ("terminate
    # called without an active exception"), which would make a successful run look failed.
    os._exit(0)


def build_engine(*, seed: int) -> Any:
    """Return a DeepSpeed engine of a Llama with random weights, the same for the same *seed*."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    size = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4
    )
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = LlamaForCausalLM(size)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def train(engine: Any, *, steps: int, out: str | None) -> list[float]:
    """Train *engine* to step *steps*; return the losses. DeepSpeed saves to *out*, also right after a resume."""
    import torch
    import torch.distributed as dist

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray().join(path.read_bytes() for path in sources), dtype=torch.uint8)
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), list[float]()
    if out and engine.global_steps:
        engine.save_checkpoint(out)
    for step in range(engine.global_steps + 1, steps + 1):
        generator = torch.Generator().manual_seed(ranks * step + rank)
        starts = torch.randint(0, len(text) - SEQUENCE, (BATCH,), generator=generator)
        tokens = torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if out and step % SAVE_EVERY == 0:
            engine.save_checkpoint(out, client_state={"loss": losses[-1]})
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
