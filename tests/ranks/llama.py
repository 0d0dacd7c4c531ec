"""
A tiny Llama trained with real DeepSpeed ZeRO-3, for benches and tests that train.

A batch depends only on its step and rank, so the same step sees the same text, interrupted or not. The text is the
source of Python's standard library, byte by byte: no download, no tokenizer.
"""

import sysconfig
from collections.abc import Container
from pathlib import Path
from typing import Any

from tests.ranks.launch import tell

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
