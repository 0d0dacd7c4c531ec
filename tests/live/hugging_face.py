"""Save through Hugging Face's Trainer and Accelerate to a store, on CPU ranks: all that the tests compare.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.live.hugging_face --out OUT --part train

``train`` trains each job twice, once saved as these libraries save and once to the store, and leaves some of them in
the middle. ``resume`` is another process, which goes on with those.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration, patch_environment
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import layerstore
from layerstore.transformers import LayerstoreCallback, checkpoint
from tests.deepspeed import models
from tests.deepspeed.trainer import (
    DROPOUT,
    Batches,
    RecordingTrainer,
    Tracer,
    append_to_trace,
    forget_state,
    training_arguments,
    zero_config,
)

STEPS = 6
SAVE_STEPS = 2
LEFT_AT = 3
"""Where jobs are left in the middle: one step after a save."""


def main() -> None:
    """Run the part that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--part", required=True, choices=sorted(PARTS))
    arguments = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    PARTS[arguments.part](arguments.out)
    end()


def end() -> None:
    """Do what a process that ends does; but taking down the threads of torch and gloo now and then aborts it."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def train_all(out: Path) -> None:
    """Train everything that the other parts go on with, or are compared with."""
    if dist.get_rank() == 0:
        layerstore.init(out / "store").close()
    dist.barrier()
    for gather in (True, False):
        job(out, f"files-{gather}", gather=gather)
    accelerate_job(out, "accelerate-files", to_store=False)
    for gather in (True, False):
        mode = "async" if gather else "sync"
        job(out, f"stored-{gather}", gather=gather, store=out / "store", limit=1, mode=mode)
    job(out, "left", store=out / "store", leave_at=LEFT_AT)
    job(out, "left-bucket", store=in_bucket(out), leave_at=LEFT_AT)
    job(out, "files-stage2", stage=2)
    job(out, "left-stage2", store=out / "store", leave_at=LEFT_AT, stage=2)
    job(out, "every", store=out / "store", every=1)
    job(out, "terminated", store=out / "store", terminate_at=LEFT_AT)
    job(out, "terminated-in-step", store=out / "store", terminate_in=LEFT_AT)
    accelerate_job(out, "accelerate-stored", to_store=True)
    # The last thing that the process does: nothing but its end completes this save.
    accelerate_job(out, "accelerate-left", to_store=True, leave_at=SAVE_STEPS)


def resume_all(out: Path) -> None:
    """Go on with what was left."""
    store = out / "store"
    job(out, "left", store=store, resume=True, trace="left-resumed")
    job(out, "left-bucket", store=in_bucket(out), resume=True, trace="left-bucket-resumed")
    job(out, "from-signal", store=store, run="terminated", resume=str(out / "terminated" / "checkpoint-3"))
    job(out, "terminated-in-step", store=store, resume=True, trace="terminated-in-step-resumed")
    # The best state so far is in a folder of stage 2, which the Trainer would load in the end.
    job(out, "to-stage3", store=store, resume=checkpoint(store, "left-stage2@2"), load_best=False)
    job(out, "left-stage2", store=store, resume=True, trace="left-stage2-resumed", stage=2)
    assert checkpoint(store, "referenced") is None
    job(out, "referenced", store=store, resume=checkpoint(store, "stored-False@2"))
    job(out, "from-every", store=store, resume=checkpoint(store, "every@3"))
    accelerate_job(
        out,
        "accelerate-left",
        to_store=True,
        resume=out / "accelerate-left" / "checkpoints" / "checkpoint_0",
        trace="accelerate-left-resumed",
    )


# -- the Trainer ---------------------------------------------------------------------------------------------------


class Left(Exception):
    """Training is left where it is, as by a crash."""


class Incidents(TrainerCallback):
    """Leaves training at the end of a step, or has it told to end."""

    def __init__(self, *, leave_at: int | None, terminate_at: int | None) -> None:
        """Do so after these steps."""
        self._leave_at = leave_at
        self._terminate_at = terminate_at
        self.trainer: StepTrainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Do what is due at this step."""
        step = self.trainer.state.global_step
        if step == self._leave_at:
            raise Left
        if step == self._terminate_at:
            terminate(self.trainer)


class StepTrainer(RecordingTrainer):
    """A Trainer that may be told to end in the middle of a step."""

    terminate_in: int | None = None

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Do the step, in which DeepSpeed updates; then be told to end, if it is that step."""
        loss = super().training_step(*arguments, **options)
        if self.state.global_step + 1 == self.terminate_in:
            terminate(self)
        return loss


def terminate(trainer: StepTrainer) -> None:
    """Send this process the signal that ends jobs, and wait until the Trainer has heard it."""
    callbacks = trainer.callback_handler.callbacks
    manager = next(each for each in callbacks if isinstance(each, JITCheckpointCallback)).jit_manager
    assert manager is not None
    manager.kill_wait = 0
    os.kill(os.getpid(), signal.SIGTERM)
    while not manager.is_checkpoint_requested:
        time.sleep(0.01)


def job(
    out: Path,
    name: str,
    *,
    gather: bool = True,
    stage: int = 3,
    store: Path | str | None = None,
    run: str | None = None,
    resume: str | bool | None = None,
    limit: int | None = None,
    load_best: bool = True,
    leave_at: int | None = None,
    terminate_at: int | None = None,
    terminate_in: int | None = None,
    trace: str | None = None,
    **settings: Any,
) -> None:
    """Train the job *name* with the Trainer; what it saves goes to *store*, if there is one."""
    say(name)
    torch.manual_seed(0)
    tracer, incidents = Tracer(out / (trace or name)), Incidents(leave_at=leave_at, terminate_at=terminate_at)
    callbacks: list[TrainerCallback] = [tracer, incidents]
    if store is not None:
        callbacks.append(LayerstoreCallback(store, run=run or name, **settings))  # the one line of layerstore
    trainer = StepTrainer(
        model=models.llama(tied=False, dropout=DROPOUT),
        args=arguments_of(
            out / name,
            limit=limit,
            load_best=load_best,
            deepspeed=gathering(stage, gather=gather),
            enable_jit_checkpoint=bool(terminate_at or terminate_in),
        ),
        train_dataset=Batches(),
        eval_dataset=torch.utils.data.Subset(Batches(), range(40, 48)),
        callbacks=callbacks,
    )
    trainer.terminate_in = terminate_in
    tracer.trainer = incidents.trainer = trainer
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Left:
        say(f"{name} is left")
    else:
        note_end(out / (trace or name), trainer)
        cast(Any, trainer).model_wrapped.destroy()
    forget_state()


def in_bucket(out: Path) -> str:
    """Return the URL of a bucket, which each rank reads through a cache of its own."""
    os.environ["LAYERSTORE_CACHE_DIR"] = str(out / f"cache-{os.environ['RANK']}")
    return f"file://{out}/bucket"


def gathering(stage: int, *, gather: bool) -> dict[str, Any]:
    """Return DeepSpeed's settings, with which it saves whole weights too, or does not."""
    config = zero_config(stage)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gather
    return config


def arguments_of(folder: Path, *, limit: int | None, load_best: bool, **more: Any) -> TrainingArguments:
    """Return the arguments of all jobs; the best state is the first, so that loading it changes the weights."""
    return training_arguments(
        folder,
        learning_rate=1e-2,
        max_steps=STEPS,
        save_steps=SAVE_STEPS,
        eval_strategy="steps",
        eval_steps=SAVE_STEPS,
        load_best_model_at_end=load_best,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
        save_total_limit=limit,
        **more,
    )


def note_end(folder: Path, trainer: StepTrainer) -> None:
    """Write down what was logged, and the whole weights at the end: those of the best state."""
    engine = cast(Any, trainer).model_wrapped
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().clone()
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    note_history(folder, trainer)


def note_history(folder: Path, trainer: RecordingTrainer) -> None:
    """Write down what was logged, but for times."""
    if dist.get_rank() == 0:
        timed = ("runtime", "per_second")
        history = [
            {key: value for key, value in entry.items() if not key.endswith(timed)}
            for entry in trainer.state.log_history
        ]
        (folder / "history.json").write_text(json.dumps(history))


# -- Accelerate ----------------------------------------------------------------------------------------------------


def accelerate_job(
    out: Path,
    name: str,
    *,
    to_store: bool,
    run: str | None = None,
    resume: Path | None = None,
    leave_at: int | None = None,
    trace: str | None = None,
) -> None:
    """Train with Accelerate: it names its folders itself, and keeps two."""
    say(name)
    torch.manual_seed(0)
    with patch_environment(ACCELERATE_USE_DEEPSPEED="true"):
        PartialState(cpu=True)
    accelerator = Accelerator(
        mixed_precision="bf16",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config()),
        project_config=ProjectConfiguration(
            project_dir=str(out / name), automatic_checkpoint_naming=True, total_limit=2 if to_store else None
        ),
    )
    model = models.llama(tied=False, dropout=DROPOUT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    saver = layerstore.attach(engine, out / "store", run=run or name) if to_store else None
    begun = 0
    if resume is not None:
        accelerator.load_state(str(resume))
        begun = int(engine.global_steps)
        accelerator.project_configuration.iteration = begun // SAVE_STEPS
    for step in range(begun + 1, STEPS + 1):
        batch = models.batch("llama", step=step, rank=accelerator.process_index, dtype=torch.bfloat16)
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        append_to_trace(out / (trace or name), step=step, loss=loss, engine=engine)
        if step % SAVE_STEPS == 0:
            accelerator.save_state()
        if step == leave_at:
            break
    else:
        if saver is not None:
            saver.close()
        engine.destroy()
    forget_state()


def say(words: str) -> None:
    """Print *words* once."""
    if dist.get_rank() == 0:
        print(f"=== {words} {time.strftime('%X')}", flush=True)


PARTS = {"train": train_all, "resume": resume_all}

if __name__ == "__main__":
    main()
