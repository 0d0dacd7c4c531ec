"""Training with an optimizer that keeps its moments in blocks of 8 bits. The program that each rank runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import layerstore
from layerstore.store import Store
from tests.live.tiny import Engine, attempt, build, done, plainly, train

RUN = "whole"
SAVED = (2, 4)
STEPS = 6
BLOCK = 64


class Blockwise(torch.optim.Optimizer):
    """Momentum in 8 bits, shaped as bitsandbytes shapes its states: codes, a scale for each block, what codes mean."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Train *parameters*."""
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"])

    def _update(self, parameter: torch.nn.Parameter, rate: float) -> None:
        state = self.state[parameter]
        blocks = -(-parameter.numel() // BLOCK)
        if not state:
            state["step"] = 0
            state["state1"] = torch.full((parameter.numel(),), 127, dtype=torch.uint8)  # 127 means zero
            state["absmax1"] = torch.zeros(blocks)
            state["qmap1"] = (torch.arange(256) - 127) / 128
        state["step"] += 1
        scales = state["absmax1"].repeat_interleave(BLOCK)[: parameter.numel()]
        momentum = 0.9 * state["qmap1"][state["state1"].long()] * scales
        if parameter.grad is not None:
            momentum += parameter.grad
        parameter.sub_(rate * momentum)
        padded = torch.nn.functional.pad(momentum, (0, blocks * BLOCK - momentum.numel())).view(blocks, BLOCK)
        state["absmax1"].copy_(padded.abs().amax(1).clamp(min=1e-30))
        codes = (padded / state["absmax1"][:, None] * 127).round() + 127
        state["state1"].copy_(codes.flatten()[: parameter.numel()].to(torch.uint8))


def run(options: Any) -> None:
    """Train, save to the store and to files; ask for what cannot be; go on from the store."""
    out = Path(options["out"])
    with Store(out / "store") as store:
        engine = built(options["optimizer"])
        with layerstore.attach(engine, store, run=RUN) as saver:
            for step in SAVED:
                train(engine, step, saver=saver, save_at=(step,))
                with plainly(engine):
                    engine.save_checkpoint(str(out / "files"), client_state={"epoch": step})
            train(engine, STEPS)
        partly: dict[str, dict[str, Any]] = {"policy": {"policy": "parity"}, "pressure": {"on_pressure": "degrade"}}
        for name, settings in partly.items():
            with layerstore.attach(engine, store, run=name, **settings) as saver:
                attempt(saver.save, name)
        again = built(options["optimizer"])
        attempt(lambda: layerstore.resume(again, store, run=RUN, policy="parity"), "mixed")
        layerstore.resume(again, store, run=RUN, step=SAVED[0], policy="exact")
        train(again, STEPS, name="again")
    done()


def built(name: str) -> Engine:
    """Return an engine whose layers' sizes two ranks cannot divide: what pads them is not zero in 8 bits."""
    return build(65, optimizer_of=partial(optimizer_of, name))


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer called *name*."""
    if name == "blockwise":
        return Blockwise(model.parameters())
    bitsandbytes: Any = import_module("bitsandbytes")
    return bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)  # type: ignore[no-any-return] # installed or not
