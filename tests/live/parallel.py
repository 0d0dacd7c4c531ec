"""The program whose engines share their state among other ranks than all of the job's, or in ways that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as ulysses
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import layerstore
from tests.forked import tell
from tests.live.tiny import Tiny, attempt, done, plainly, step

Engine = Any  # deepspeed ships no types

SAVED, STEPS = 2, 4


def engine_of(model: nn.Module, *, stage: int, zero: Any = None, config: Any = None, **given: Any) -> Engine:
    """Return a new engine around *model*; forget the groups of the one before."""
    groups.mpu = groups.mesh_device = None
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        **(config or {}),
    }
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=whole, **given)[0]


def sequence_parallel(options: Any) -> None:
    """Save under Ulysses with an mpu, live and as files; go on from what each makes, under every stage."""
    out = Path(options["out"])
    deepspeed.init_distributed("gloo")
    ulysses.initialize_sequence_parallel(dist.get_world_size())
    for stage in (1, 2, 3):
        name = f"stage{stage}"
        torch.manual_seed(0)
        engine = engine_of(Tiny(16), stage=stage, mpu=ulysses)
        with layerstore.attach(engine, options["store"], run=name) as saver:
            trained(engine, SAVED, name)
            saver.save()
            with plainly(engine):
                engine.save_checkpoint(str(out / name))
            drawn = torch.get_rng_state()
            trained(engine, STEPS, name)
        for source in ("own", "store"):
            if source == "own":
                engine.load_checkpoint(str(out / name))
            else:
                layerstore.resume(engine, options["store"], run=name)
            torch.set_rng_state(drawn)
            trained(engine, STEPS, f"{name} from {source}")
    done()


def trained(engine: Engine, upto: int, name: str) -> None:
    """Train *engine* up to step *upto*, and tell the losses."""
    while engine.global_steps < upto:
        tell("loss", step=engine.global_steps + 1, loss=step(engine), name=name)


def refused(options: Any) -> None:
    """Attach to engines that cannot be saved."""

    deepspeed.init_distributed("gloo")

    def attached(name: str, engine: Engine) -> None:
        attempt(lambda: layerstore.attach(engine, options["store"], run="none"), name)

    attached("mesh_param", engine_of(Tiny(16), stage=1, mesh_param=(1, dist.get_world_size())))
    sizes = {"data_parallel_size": 1, "sequence_parallel_size": dist.get_world_size()}
    attached("mesh in the config", engine_of(Tiny(16), stage=3, config=sizes))
    attached("elastic", engine_of(Tiny(16), stage=2, zero={"elastic_checkpoint": True}))
    piped = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())
    attached("pipeline", engine_of(piped, stage=1))
    llama: Any = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=32, vocab_size=32, num_attention_heads=2)
    )
    shares = {"tensor_parallel": {"autotp_size": dist.get_world_size()}}
    attached("AutoTP", engine_of(llama.to(torch.bfloat16), stage=1, config=shares))
    done()
