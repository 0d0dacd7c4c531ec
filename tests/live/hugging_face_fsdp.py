"""Save through Hugging Face's Trainer and Accelerate under FSDP2 to a store, on CPU ranks: all that the tests compare.

    OMP_NUM_THREADS=1 python -m torch.distributed.run --nproc-per-node 2 \
        -m tests.live.hugging_face_fsdp --out OUT --part train

``train`` trains each job once as these libraries save and once to the store, and leaves some of them in the middle.
``resume`` is another process, which goes on with those, and ``elsewhere`` goes on with one on another number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import layerstore
from layerstore.transformers import LayerstoreCallback, checkpoint
from tests.deepspeed import models
from tests.deepspeed.trainer import DROPOUT, Batches, RecordingTrainer
from tests.live import hugging_face
from tests.live.hugging_face import LEFT_AT, SAVE_STEPS, STEPS, Left, arguments_of, end, note_history, say

FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def main() -> None:
    """Run the part that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--part", required=True, choices=sorted(PARTS))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    if arguments.part == "train":
        hugging_face.job(arguments.out, "zero", store=arguments.out / "store", leave_at=LEFT_AT)
    shard_on_cpus()
    PARTS[arguments.part](arguments.out)
    end()


def shard_on_cpus() -> None:
    """Have Accelerate take these CPUs for accelerators: on CPUs it ignores all settings of FSDP."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def train_all(out: Path) -> None:
    """Train everything that the other parts go on with, or are compared with."""
    for form in FORMS:
        job(out, f"files-{form}", form=form)
    accelerate_job(out, "accelerate-plain")
    for form in FORMS:
        job(
            out,
            f"stored-{form}",
            form=form,
            store=out / "store",
            limit=1,
            mode="async" if form in FORMS[:1] else "sync",
        )
        job(out, f"left-{form}", form=form, store=out / "store", leave_at=LEFT_AT)
    job(out, "every", store=out / "store", every=1)
    accelerate_job(out, "accelerate-stored", store=out / "store")
    accelerate_job(out, "accelerate-left", store=out / "store", leave_at=LEFT_AT)


def resume_all(out: Path) -> None:
    """Go on with what was left."""
    store = out / "store"
    for form in FORMS:
        job(out, f"left-{form}", form=form, store=store, resume=True, trace=f"resumed-{form}")
    assert checkpoint(store, "referenced") is None
    job(out, "referenced", store=store, resume=checkpoint(store, "every@3"))
    job(out, "from-zero", store=store, resume=checkpoint(store, "zero@2"), load_best=False)
    job(out, "other-form", form=FORMS[1], store=store, resume=checkpoint(store, f"stored-{FORMS[0]}@2"))
    accelerate_job(out, "accelerate-left", store=store, trace="accelerate-resumed")


def go_on_elsewhere(out: Path) -> None:
    """Go on with a folder of the first part, on however many ranks there are."""
    folder = out / f"stored-{FORMS[0]}" / f"checkpoint-{SAVE_STEPS}"
    job(out, "elsewhere", store=out / "store", resume=str(folder), load_best=False)


# -- the Trainer ---------------------------------------------------------------------------------------------------


class Recorder(TrainerCallback):
    """Writes down what training begins with, and each step; leaves training after a step."""

    def __init__(self, folder: Path, *, leave_at: int | None) -> None:
        """Write to *folder*."""
        self._folder = folder
        self._leave_at = leave_at
        self.trainer: RecordingTrainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Keep the whole state that training begins with."""
        keep(self._folder / "begun.pt", state_of(self.trainer.model, self.trainer.optimizer))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Append the step that has just ended."""
        step = self.trainer.state.global_step
        append_to_trace(self._folder, step=step, loss=self.trainer.last_loss)
        if step == self._leave_at:
            raise Left


def job(
    out: Path,
    name: str,
    *,
    form: str = FORMS[0],
    store: Path | None = None,
    resume: str | bool | None = None,
    limit: int | None = None,
    load_best: bool = True,
    leave_at: int | None = None,
    trace: str | None = None,
    **settings: Any,
) -> None:
    """Train the job *name* with the Trainer under FSDP2; what it saves goes to *store*, if there is one."""
    say(name)
    torch.manual_seed(0)
    recorder = Recorder(out / (trace or name), leave_at=leave_at)
    callbacks: list[TrainerCallback] = [recorder]
    if store is not None:
        callbacks.append(LayerstoreCallback(store, run=name, **settings))  # the one line of layerstore
    trainer = RecordingTrainer(
        model=models.llama(tied=False, dropout=DROPOUT),
        args=arguments_of(
            out / name,
            limit=limit,
            load_best=load_best,
            fsdp=True,
            fsdp_config={"state_dict_type": form, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        ),
        train_dataset=Batches(),
        eval_dataset=torch.utils.data.Subset(Batches(), range(40, 48)),
        callbacks=callbacks,
    )
    recorder.trainer = trainer
    try:
        trainer.train(resume_from_checkpoint=resume)
    except Left:
        say(f"{name} is left")
    else:
        keep(out / (trace or name) / "ended.pt", dict(whole(trainer.model)))
        note_history(out / (trace or name), trainer)
    forget_state()


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all whole tensors of model and optimizer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict(whole(model))
    for parameter, state in getattr(optimizer, "optimizer", optimizer).state.items():
        for key, value in state.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{names[id(parameter)]}.{key}"] = torch.as_tensor(full).clone()
    return found


def whole(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each whole parameter."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def keep(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write *tensors* to *path*, once."""
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, path)


def append_to_trace(folder: Path, *, step: int, loss: torch.Tensor) -> None:
    """Write one step's entry; every rank must call this."""
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, float(loss.detach()).hex())
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "trace.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": step, "losses": losses}) + "\n")


# -- Accelerate ----------------------------------------------------------------------------------------------------


def accelerate_job(
    out: Path, name: str, *, store: Path | None = None, leave_at: int | None = None, trace: str | None = None
) -> None:
    """Train in a loop of our own with what Accelerate has prepared, and save with layerstore's saver."""
    say(name)
    torch.manual_seed(0)
    accelerator = Accelerator(
        mixed_precision="bf16",
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        ),
    )
    module = models.llama(tied=False, dropout=DROPOUT)
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1))
    begun, saver = 0, None
    if store is not None:
        resumed = layerstore.resume(model, optimizer, store, run=name)
        begun = 0 if resumed is None else resumed.step
        saver = layerstore.attach(model, optimizer, store, run=name)
    for step in range(begun + 1, STEPS + 1):
        batch = models.batch("llama", step=step, rank=accelerator.process_index, dtype=torch.bfloat16)
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        append_to_trace(out / (trace or name), step=step, loss=loss)
        if saver is not None and step % SAVE_STEPS == 0:
            saver.save(step=step)
        if step == leave_at:
            break
    else:
        if saver is not None:
            saver.close()
    forget_state()


def forget_state() -> None:
    """Drop what Accelerate keeps for the whole process, so that the next job's settings count."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


PARTS = {"train": train_all, "resume": resume_all, "elsewhere": go_on_elsewhere}

if __name__ == "__main__":
    main()
