"""What ranks do that train one run under ZeRO-3, under FSDP2, and under ZeRO-3 again, with only a store between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import layerstore
from tests.forked import tell
from tests.live.tiny import Engine, Tiny, build, done, train

RUN = "sft"
MOMENTS = ("exp_avg", "exp_avg_sq")

Numbers = dict[tuple[str, str], torch.Tensor]
"""Masters and moments, whole, by parameter and state."""


def there_and_back(options: Any) -> None:
    """Train two steps under each, and tell whether masters and moments are the same at each handover."""
    store = options["store"]
    engine = build()
    with layerstore.attach(engine, store, run=RUN) as saver:
        train(engine, 2, saver=saver, save_at=[2])
    expected = of_engine(engine)

    model, optimizer = module()
    found = layerstore.resume(model, optimizer, store, run=RUN)
    assert found is not None
    tell("there", same=alike(of_module(model, optimizer), expected), kept=found.client_state, step=found.step)
    with layerstore.attach(model, optimizer, store, run=RUN) as saver:
        go_on(model, optimizer, 2)
        saver.save(client_state={"epoch": 40})
        expected = of_module(model, optimizer)
    with layerstore.attach(model, optimizer, store, run=RUN, policy="parity") as saver:
        go_on(model, optimizer, 1)
        tell("mixed", due=list(saver.save(5).layers_due))

    engine = build()
    back = layerstore.resume(engine, store, run=RUN, step=4)
    assert back is not None
    tell("back", same=alike(of_engine(engine), expected), kept=back.client_state, steps=engine.global_steps)
    tell("notes", notes=back.notes)
    mixture = layerstore.resume(engine, store, run=RUN)
    assert mixture is not None
    tell("mixture", layers=mixture.layers)
    folder = Path(options["out"])
    if dist.get_rank() == 0:
        with layerstore.open(store) as opened:
            opened.compose(f"{RUN}@4").export(folder, format="zero3")
    dist.barrier()
    engine = build()
    engine.load_checkpoint(str(folder))
    tell("folder", same=alike(of_engine(engine), expected), steps=engine.global_steps)
    layerstore.resume(engine, store, run=RUN, step=4)
    with layerstore.attach(engine, store, run=RUN) as saver:
        train(engine, 6, saver=saver, save_at=[6])
    done()


def module() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model, with other weights, under FSDP2."""
    torch.manual_seed(7)
    model = Tiny(64)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Make some updates."""
    for _ in range(updates):
        model(torch.randn(2, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_engine(engine: Engine) -> Numbers:
    """Return what the engine holds."""
    found: Numbers = {}
    for name, parameter in engine.module.named_parameters():
        found[name, ""] = safe_get_full_fp32_param(parameter).clone()
        for state in MOMENTS:
            found[name, state] = safe_get_full_optimizer_state(parameter, state).clone()
    return found


def of_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> Numbers:
    """Return what the module and its optimizer hold."""
    found: Numbers = {}
    for name, parameter in model.named_parameters():
        found[name, ""] = whole(parameter)
        for state in MOMENTS:
            found[name, state] = whole(optimizer.state[parameter][state])
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of *tensor*."""
    held = tensor.detach()
    found: torch.Tensor = held.full_tensor() if isinstance(held, DTensor) else held
    return found.clone()


def alike(ours: Numbers, theirs: Numbers) -> bool:
    """Whether they are the same to the last bit."""
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32)) for key in ours
    )
