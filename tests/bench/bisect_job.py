"""
Histories with planted faults, for the benchmark of `bisect`: the program that one rank runs.

A small Llama is trained under DeepSpeed, and saved. For each fault training goes on from there in a run of its own that
is saved every few steps, and from one of these saves on has the fault:

    damage      one layer's weights get noise, once; all learn gently, so that it does not heal
    rate        one layer learns with 30 times the learning rate from there on
    pair        two layers get less noise: the judge's threshold is such that neither suffices
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import layerstore
from tests.bench.ranked import asked, begin, end
from tests.ranks.llama import SEQUENCE, build_engine, corpus

if TYPE_CHECKING:
    pass

LAYERS = 12
HIDDEN = 64
BATCH = 4
TRAINED_STEPS = 250
GENTLE = 0.001
"""How much smaller the learning rate of a gentle run is."""
RATE = 30.0
DAMAGE, PAIR = 3.0, 1.5
"""Noise, relative to the size of each of the layer's matrices."""
CLEAN, BASE = "clean", "base"

Kind = Literal["damage", "rate", "pair"]
KINDS: tuple[Kind, ...] = ("damage", "rate", "pair")
Parameters = list[tuple[str, Any]]


@dataclass(slots=True, kw_only=True)
class Fault:
    """What was planted."""

    run: str
    kind: Kind
    step: int
    """The first save that has it."""
    layers: list[str]


@dataclass(slots=True, kw_only=True)
class Result:
    """What the job leaves."""

    steps: list[int]
    """All saves of each run."""
    faults: list[Fault]


def main() -> None:
    """Train, and plant faults."""
    options = asked(faults=int, saves=int)
    begin()
    end(Job(options.data / "store", saves=options.saves).run(options.faults), options.out)


class Job:
    """An engine and its store."""

    def __init__(self, store: Path, *, saves: int) -> None:
        import torch
        import torch.distributed as dist

        self._store, self._saves = store, saves
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
        self._engine = build_engine(layers=LAYERS, hidden=HIDDEN)

    def run(self, faults: int) -> Result:
        """Return what was planted."""
        import torch.distributed as dist

        for _ in range(TRAINED_STEPS):
            self._step()
        if self._rank == 0:
            layerstore.init(self._store).close()
        dist.barrier()
        with layerstore.attach(self._engine, self._store, run=BASE) as saver:
            saver.save()
        steps = [self._engine.global_steps + number for number in range(self._saves)]
        self._save_all(CLEAN, None, steps)
        found = []
        for number in range(faults):
            draw, kind = random.Random(number), KINDS[number % len(KINDS)]
            layers = draw.sample(range(LAYERS), 2 if kind == "pair" else 1)
            names = sorted(f"model.layers.{layer}" for layer in layers)
            found.append(Fault(run=f"fault{number}", kind=kind, step=draw.choice(steps[1:-6]), layers=names))
            self._save_all(found[-1].run, found[-1], steps)
        return Result(steps=steps, faults=found)

    def _save_all(self, run: str, fault: Fault | None, steps: list[int]) -> None:
        """Train on from the base, and save at *steps*, with *fault* from its step on."""
        layerstore.resume(self._engine, self._store, run=BASE, must_exist=True)
        if fault is None or fault.kind != "rate":
            rates = self._engine.lr_scheduler
            rates.base_lrs = [GENTLE * rate for rate in rates.base_lrs]
            for group in self._engine.optimizer.param_groups:
                group["lr"] *= GENTLE
        parameters = [
            (name, parameter)
            for name, parameter in self._engine.module.named_parameters()
            if fault is not None
            and name.startswith(tuple(f"{layer}." for layer in fault.layers))
            and "norm" not in name
        ]
        with layerstore.attach(self._engine, self._store, run=run) as saver:
            for step in steps:
                while self._engine.global_steps < step:
                    self._step(faster=parameters if fault and fault.kind == "rate" and fault.step <= step else [])
                if fault is not None and fault.step == step and fault.kind != "rate":
                    _damage(parameters, size=PAIR if fault.kind == "pair" else DAMAGE)
                saver.save()

    def _step(self, *, faster: Parameters = []) -> None:  # noqa: B006  # never changed
        """Make one step; parameters *faster* move `RATE` times as far."""
        import torch
        from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

        step = self._engine.global_steps + 1
        generator = torch.Generator().manual_seed(self._ranks * step + self._rank)
        starts = torch.randint(0, len(self._text) - SEQUENCE, (BATCH,), generator=generator)
        tokens = torch.stack([self._text[start : start + SEQUENCE] for start in starts.tolist()]).long()
        before = [safe_get_full_fp32_param(parameter).clone() for _, parameter in faster]
        self._engine.backward(self._engine(input_ids=tokens, labels=tokens).loss)
        self._engine.step()
        for old, (_, parameter) in zip(before, faster, strict=True):
            safe_set_full_fp32_param(parameter, old + RATE * (safe_get_full_fp32_param(parameter) - old))


def _damage(parameters: Parameters, *, size: float) -> None:
    """Add noise to *parameters*, of *size* relative to their own; the same on every rank."""
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    generator = torch.Generator().manual_seed(0)
    for _, parameter in parameters:
        weights: torch.Tensor = safe_get_full_fp32_param(parameter)
        noise = torch.randn(weights.shape, generator=generator)
        safe_set_full_fp32_param(parameter, weights + size * weights.std() * noise)


if __name__ == "__main__":
    main()
