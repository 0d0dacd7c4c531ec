"""Train through Hugging Face's Trainer and Accelerate on CPU ranks: one launch, all scenarios.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.deepspeed.trainer --out OUT [--resume-from DIR]

The counterpart of ``training.py``, with the same traces, but nothing here calls ``save_checkpoint``: what
lies in the folders is what these libraries leave there. With ``--resume-from`` the Trainer goes on from
``DIR/<scenario>/checkpoint-2`` and Accelerate from ``DIR/<scenario>/step2``, each by its own means
(``resume_from_checkpoint``, ``load_state``).
Attention dropout is on, so that a lost random state changes the losses.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import patch_environment
from deepspeed.runtime.zero.partition_parameters import Init
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.deepspeed import models
from tests.deepspeed.scenarios import (
    HUGGING_FACE_SCENARIO_OF,
    RESUME_STEP,
    SAVE_STEPS,
    STEPS,
    HuggingFaceScenario,
)

DROPOUT = 0.25


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--scenario", action="append", choices=sorted(HUGGING_FACE_SCENARIO_OF))
    arguments = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo")
    chosen = [HUGGING_FACE_SCENARIO_OF[name] for name in arguments.scenario or HUGGING_FACE_SCENARIO_OF]
    for scenario in chosen:
        if dist.get_rank() == 0:
            print(f"=== {scenario.name}", flush=True)
        run = run_accelerate if scenario.library == "accelerate" else run_trainer
        run(scenario, out=arguments.out, resume_from=arguments.resume_from)
        forget_state()
    dist.barrier()
    sys.stdout.flush()
    # All is written. Taking down the threads of torch and gloo now and then aborts the process,
    # which would make good training look failed.
    os._exit(0)


def forget_state() -> None:
    """Drop what both libraries keep for the whole process, so that the next scenario's config counts."""
    gc.collect()
    # The partial state too, else a second Accelerator takes it for its own; the process group outlives both.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call] # transformers leaves it untyped
    Init.param_id = 0


def zero_config(stage: int = 3) -> dict[str, Any]:
    """Return DeepSpeed's config for both libraries."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3},
    }


def append_to_trace(folder: Path, *, step: int, loss: torch.Tensor, engine: Any) -> None:
    """Write one step's entry; every rank must call this."""
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, float(loss.detach()).hex())
    if dist.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "trace.jsonl").open("a") as lines:
        entry = {"step": step, "losses": losses, "grad_norm": float(engine.get_global_grad_norm()).hex()}
        lines.write(json.dumps(entry) + "\n")


class RecordingTrainer(Trainer):
    """A Trainer that notes exact losses; its own log rounds them."""

    max_shard_size = "50GB"

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Do the step and keep its loss."""
        self.last_loss: torch.Tensor = super().training_step(*arguments, **options)
        return self.last_loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save as the Trainer does, in shards of *max_shard_size*: it has no argument for that."""
        model = cast(Any, self.model)
        save_pretrained = model.save_pretrained
        model.save_pretrained = lambda *arguments, **options: save_pretrained(
            *arguments, **options, max_shard_size=self.max_shard_size
        )
        try:
            super()._save(output_dir, state_dict)
        finally:
            del model.save_pretrained


class Tracer(TrainerCallback):
    """Writes the trace after every optimizer step."""

    def __init__(self, folder: Path) -> None:
        """Trace into *folder*."""
        self.folder = folder
        self.trainer: RecordingTrainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Append the step that has just ended."""
        trainer = self.trainer
        append_to_trace(
            self.folder,
            step=trainer.state.global_step,
            loss=trainer.last_loss,
            engine=cast(Any, trainer).model_wrapped,
        )


class Batches(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Fixed token sequences, one per index."""

    def __len__(self) -> int:
        """Return enough sequences for all steps of all ranks."""
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return the sequence of *index*."""
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, models.VOCABULARY, (16,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def training_arguments(folder: Path, **more: Any) -> TrainingArguments:
    """Return what every Trainer here is told, and *more*."""
    return TrainingArguments(
        output_dir=str(folder),
        bf16=True,
        use_cpu=True,
        optim="adamw_torch",
        weight_decay=0.1,
        warmup_steps=4,
        save_strategy="steps",
        logging_steps=1,
        per_device_train_batch_size=2,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=[],
        seed=0,
        **more,
    )


def run_trainer(scenario: HuggingFaceScenario, *, out: Path, resume_from: Path | None) -> None:
    """Train with the Trainer's own AdamW and scheduler, saved by its own schedule."""
    folder = out / scenario.name
    arguments = training_arguments(
        folder, deepspeed=zero_config(scenario.stage), learning_rate=1e-3, max_steps=STEPS, save_steps=SAVE_STEPS[0]
    )
    torch.manual_seed(0)
    tracer = Tracer(folder)
    trainer = RecordingTrainer(
        model=models.llama(tied=scenario.tied, dropout=DROPOUT),
        args=arguments,
        train_dataset=Batches(),
        callbacks=[tracer],
    )
    trainer.max_shard_size = scenario.max_shard_size
    tracer.trainer = trainer
    source = scenario.checkpoint(resume_from, step=RESUME_STEP) if resume_from else None
    trainer.train(resume_from_checkpoint=str(source) if source else None)
    cast(Any, trainer).model_wrapped.destroy()


def run_accelerate(scenario: HuggingFaceScenario, *, out: Path, resume_from: Path | None) -> None:
    """Train in a loop of our own, with Accelerate's ``save_state`` and ``load_state``."""
    torch.manual_seed(0)
    # As the Trainer does it. Accelerator(cpu=True) would choose DistributedDataParallel whatever the plugin
    # says, and Accelerator() alone would take two CPU processes for two jobs.
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
        PartialState(cpu=True)
    accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config()))
    model = models.llama(tied=scenario.tied, dropout=DROPOUT)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if "norm" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in model.named_parameters() if "norm" in n], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if resume_from is not None:
        accelerator.load_state(str(scenario.checkpoint(resume_from, step=RESUME_STEP)))
    for step in range(RESUME_STEP + 1 if resume_from else 1, STEPS + 1):
        batch = models.batch("llama", step=step, rank=accelerator.process_index, dtype=torch.bfloat16)
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        append_to_trace(out / scenario.name, step=step, loss=loss, engine=engine)
        if step in SAVE_STEPS:
            accelerator.save_state(str(scenario.checkpoint(out, step=step)))
    engine.destroy()


if __name__ == "__main__":
    main()
