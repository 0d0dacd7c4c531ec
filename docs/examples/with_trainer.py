"""
Train with the Trainer of Transformers; its checkpoints go to a store. Started again, it goes on where it was.

    torchrun --nproc-per-node 2 with_trainer.py --store runs/store --steps 8
"""

import argparse
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from layerstore.transformers import LayerstoreCallback, checkpoint  # layerstore

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
    parser.add_argument("--out", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()

    arguments = TrainingArguments(
        output_dir=options.out,
        deepspeed=DEEPSPEED,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        optim="adamw_torch",
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        per_device_train_batch_size=2,
        max_steps=options.steps,
        save_steps=2,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    torch.manual_seed(0)
    trainer = Trainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=99, num_hidden_layers=2)),
        args=arguments,
        train_dataset=examples(),
        callbacks=[LayerstoreCallback(options.store, run="trainer")],  # layerstore
    )
    resume = checkpoint(options.store, "trainer")  # layerstore: None where there is nothing to go on with
    trainer.train(resume_from_checkpoint=resume)
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: {entry['loss']}", flush=True)


def examples() -> list[dict[str, Any]]:
    """Return something to learn."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


if __name__ == "__main__":
    main()
