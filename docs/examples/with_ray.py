"""
Train under Ray Train; the engine's state goes to a store. Workers that fail are started again, and go on from there.

    python with_ray.py --store runs/store --steps 8
"""

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM

import layerstore  # layerstore

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    """Let two workers train for as many steps as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, type=Path)
    parser.add_argument("--out", default="runs/ray", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    trainer = TorchTrainer(
        train,
        # Workers have a working directory of their own.
        train_loop_config={"store": str(options.store.resolve()), "steps": options.steps},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(options.out.resolve()), failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


def train(options: dict[str, Any]) -> None:
    """Be one of the workers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=99, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=DEEPSPEED)

    layerstore.resume(engine, options["store"], run="ray")  # layerstore: nothing at the first launch
    with layerstore.attach(engine, options["store"], run="ray") as saver:  # layerstore
        for step in range(engine.global_steps + 1, options["steps"] + 1):
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
