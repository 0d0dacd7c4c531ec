"""
Train with Accelerate; its checkpoints go to a store. Started again, it goes on where it was.

    accelerate launch --num_processes 2 --use_deepspeed with_accelerate.py --store runs/store --steps 8

That is for GPUs. The guide says what Accelerate wants to be told on CPUs.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import layerstore  # layerstore

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def main() -> None:
    """Train for as many steps as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", default="runs/accelerate", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=DEEPSPEED))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=99, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer = accelerator.prepare(model, optimizer)
    saver = layerstore.attach(engine, options.store, run="accelerate")  # layerstore

    folders = sorted(options.out.glob("step*"))
    if folders:
        accelerator.load_state(str(folders[-1]))  # what lies there leads to the store

    for step in range(engine.global_steps + 1, options.steps + 1):
        tokens = batch(step, accelerator.process_index).to(accelerator.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: {loss.item()}", flush=True)
        if step % 2 == 0:
            accelerator.save_state(str(options.out / f"step{step:06}"))
    saver.close()  # layerstore


def batch(step: int, rank: int) -> torch.Tensor:
    """Return what *rank* learns at *step*."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 64, (2, 16), generator=generator)


if __name__ == "__main__":
    main()
