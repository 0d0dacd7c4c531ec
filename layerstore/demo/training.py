"""
Train a tiny Llama with real DeepSpeed ZeRO-3: the program that every rank of the demo runs.

    python -m torch.distributed.run --nproc-per-node 2 -m layerstore.demo.training \\
        --steps 20 --out DIR --save-at 10 20 [--resume CHECKPOINT ...]

A batch depends only on its step and rank, so the same step sees the same text, interrupted or not. The text is the
source of Python's standard library, byte by byte: no download, no tokenizer. Each checkpoint to resume from gets its
own engine, which trains to the last step. The first of these also saves, including the state as loaded if its step is
in --save-at.
Events are printed in lines that `layerstore.demo.launch` reads.
"""

import argparse
import os
import signal
import sys
import sysconfig
from collections.abc import Container
from pathlib import Path
from typing import Any

from layerstore.demo.launch import tell

VOCABULARY = 256
"""Every byte is a token."""

HIDDEN = 128
LAYERS = 6
HEADS = 4
SEQUENCE = 128
BATCH = 4
LEARNING_RATE = 2e-3
WARMUP_STEPS = 10

TEXT_BYTES_MAX = 4 * 1024 * 1024
"""Most of the top level of the standard library; takes a few milliseconds to read."""

Engine = Any  # deepspeed ships no types


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save-at", type=int, nargs="+", required=True)
    parser.add_argument("--resume", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()

    # As an exception, so that an interrupted compile releases its lock file; the next compile would wait for it
    # forever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    if not arguments.resume:
        train(build_engine(), steps=arguments.steps, out=arguments.out, saves=arguments.save_at)
    for number, checkpoint in enumerate(arguments.resume):
        engine = build_engine(seed=number + 1)  # with weights that differ from the run's
        load(engine, checkpoint)
        if dist.get_rank() == 0:
            tell("resumed", checkpoint=number)
        saves = arguments.save_at if number == 0 else []
        if engine.global_steps in saves:
            engine.save_checkpoint(str(arguments.out))
        train(engine, steps=arguments.steps, out=arguments.out, saves=saves)
    dist.barrier()
    sys.stdout.flush()
    # Everything is written. Shutting down the threads of torch and gloo occasionally aborts the process ("terminate
    # called without an active exception"), which would make a good training look failed.
    os._exit(0)


def build_engine(*, layers: int = LAYERS, hidden: int = HIDDEN, seed: int = 0) -> Engine:
    """Return a DeepSpeed engine of a Llama with random weights, the same for the same *seed*."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    llama = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
    )
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(llama)
    named = list(model.named_parameters())
    groups = [
        {"params": [parameter for name, parameter in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def load(engine: Engine, checkpoint: Path) -> None:
    """Load *checkpoint* through DeepSpeed's own loader."""
    loaded, _ = engine.load_checkpoint(str(checkpoint))
    # If DeepSpeed finds nothing, it only warns and would train from scratch.
    if loaded is None or engine.global_steps == 0:
        raise SystemExit(f"DeepSpeed loaded nothing from {checkpoint}")


def train(engine: Engine, *, steps: int, out: Path, saves: Container[int]) -> None:
    """Train *engine* up to step *steps*; DeepSpeed itself saves to *out* at the steps *saves*."""
    import torch
    import torch.distributed as dist

    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(engine.global_steps + 1, steps + 1):
        generator = torch.Generator().manual_seed(ranks * step + rank)
        starts = torch.randint(0, len(text) - SEQUENCE, (BATCH,), generator=generator)
        tokens = torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        average = float(mean.item() / ranks)
        if rank == 0:
            tell("step", step=step, loss=average.hex())
        if step in saves:
            engine.save_checkpoint(str(out), client_state={"loss": average})


def tag_of(step: int) -> str:
    """Return DeepSpeed's default tag for *step*."""
    return f"global_step{step}"


def corpus() -> bytes:
    """Return the first bytes of the standard library's sources, sorted by name."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES_MAX:
            break
    if len(text) <= SEQUENCE:
        raise SystemExit("this Python has no sources of its standard library to train on")
    return bytes(text[:TEXT_BYTES_MAX])


if __name__ == "__main__":
    main()
