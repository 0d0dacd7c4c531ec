"""What the ranks of the fault tests train: small, fast, and different with every lost bit of state."""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import layerstore
from layerstore.errors import StorageIO
from layerstore.history import resolve
from tests.forked import tell

Engine = Any  # deepspeed ships no types

RUN = "run"
STEPS = 7
SAVED = 3
"""Steps that are saved in peace; the next one is disturbed."""


class Block(nn.Module):
    """A residual block with dropout: its losses follow from the random state too."""

    def __init__(self, hidden: int) -> None:
        """Build the block."""
        super().__init__()
        self.up = nn.Linear(hidden, hidden)
        self.down = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return *hidden* plus what this block adds."""
        return hidden + self.dropout(self.down(torch.relu(self.up(hidden))))  # type: ignore[no-any-return] # modules are untyped calls


class Tiny(nn.Module):
    """Four blocks between an embedding and a head."""

    def __init__(self, hidden: int) -> None:
        """Build the module."""
        super().__init__()
        self.embed = nn.Linear(5, hidden)
        self.layers = nn.ModuleList(Block(hidden) for _ in range(4))
        self.head = nn.Linear(hidden, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error against the first three inputs."""
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        errors: torch.Tensor = self.head(hidden) - inputs[:, :3]
        return (errors.float() ** 2).mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return the usual optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def build(
    hidden: int = 64, *, accumulated: int = 1, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> Engine:
    """Return a new engine, the same one every time; so many batches make one update."""
    import deepspeed  # here: tests import this module for its numbers, in every process

    gc.collect()
    logging.basicConfig(format="%(name)s: %(message)s")
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulated,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Tiny(hidden)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    return engine


def step(engine: Engine) -> str:
    """Train *engine* one step on what torch's own generator draws; return the mean loss's bits."""
    loss = engine(torch.randn(2, 5).to(torch.bfloat16))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    return float(mean.item()).hex()


def train(engine: Engine, upto: int, *, saver: Any = None, save_at: Sequence[int] = (), name: str = "") -> None:
    """Train *engine* up to step *upto*, saving after the steps *save_at*; tell every loss."""
    while engine.global_steps < upto:
        loss = step(engine)
        number = int(engine.global_steps)
        if dist.get_rank() == 0:
            tell("loss", step=number, loss=loss, name=name)
        if number in save_at:
            saved = saver.save(client_state={"epoch": number})
            tell("saved", step=number, due=list(saved.layers_due), skipped=saved.skipped, name=name)


def begin(place: Any, *, until: int, save_at: Sequence[int] = range(STEPS), pin: str = "", **options: Any) -> None:
    """Train a new engine, saving to *place*, which holds nothing yet; the end may be a save with a *pin*."""
    engine = build()
    assert layerstore.resume(engine, place, run=RUN) is None
    with layerstore.attach(engine, place, run=RUN, **options) as saver:
        train(engine, until, saver=saver, save_at=save_at)
        if pin:
            saver.save(pin=pin)
    told(saver)


def resumed(place: Any, *, run: str = RUN, name: str = "") -> Engine:
    """Return a new engine that goes on from what *place* has of *run*."""
    engine = build()
    found = layerstore.resume(engine, place, run=run, must_exist=True)
    assert found is not None
    tell("resumed", step=found.step, client_state=found.client_state, name=name)
    return engine


def to_the_end(engine: Engine, place: Any, *, run: str = RUN, name: str = "", **options: Any) -> None:
    """Train *engine* to the last step, saving at every step."""
    with layerstore.attach(engine, place, run=run, **options) as saver:
        train(engine, STEPS, saver=saver, save_at=range(STEPS + 1), name=name)
        saver.wait()
    told(saver, name)


def told(saver: Any, name: str = "") -> None:
    """Tell how *saver* is doing."""
    tell("status", **asdict(saver.status()), name=name)


def done() -> None:
    """End this rank at once: taking down gloo's threads now and then aborts a process that is over."""
    dist.barrier()
    os._exit(0)


@contextmanager
def plainly(engine: Any) -> Iterator[None]:
    """Let *engine* save files as if nothing were attached to it."""
    attached = engine.checkpoint_engine
    engine.checkpoint_engine = getattr(attached, "real", attached)
    try:
        yield
    finally:
        engine.checkpoint_engine = attached


@dataclass(slots=True)
class Faults:
    """A hook for a store's files that lets some operations of this rank take long, fail, or kill it."""

    rules: list[tuple[str, str, Callable[[Path], None]]] = field(default_factory=list)

    def __call__(self, operation: str, path: Path) -> None:
        """Do what the first rule for this operation says."""
        # Not in the folders above the store, which may be /tmp itself.
        in_store = f"/{'/'.join(path.parts[-3:])}"
        for wanted, part, action in list(self.rules):
            if operation == wanted and part in in_store:
                action(path)
                return

    def on(self, operation: str, part: str, action: Callable[[Path], None], *, rank: int | None = None) -> Faults:
        """On *rank*, or everywhere, do *action* before *operation* of a path with *part* in it."""
        if rank is None or rank == dist.get_rank():
            self.rules.append((operation, part, action))
        return self

    def clear(self) -> None:
        """Let everything work again."""
        self.rules.clear()


def slow(seconds: float) -> Callable[[Path], None]:
    """Return what takes *seconds*."""
    return lambda _: time.sleep(seconds)


def fail(number: int) -> Callable[[Path], None]:
    """Return what fails with the errno *number*."""

    def refuse(path: Path) -> None:
        raise StorageIO(f"cannot write {path}: made up", errno=number, filename=str(path), hint="none")

    return refuse


def hold(name: str) -> Callable[[Path], None]:
    """Return what tells that it is there, and stays there until the rank is killed."""

    def stay(path: Path) -> None:
        tell("held", name=name, path=path.name)
        time.sleep(1000)

    return stay


def attempt(work: Callable[[], object], name: str) -> bool:
    """Call *work* and tell how that ended; return whether it worked."""
    try:
        work()
    except Exception as exc:  # noqa: BLE001 - the test judges it
        tell("raised", name=name, error=type(exc).__name__, message=str(exc))
        return False
    tell("worked", name=name)
    return True


def flip(path: Path, run: str, damage: str, *, rank: int, step: int = 1) -> None:
    """Flip a byte in the middle of an object of *rank*'s in the commit of *run* at *step*."""
    with layerstore.open(path) as store:
        layers = resolve(store.repo, f"{run}@{step}").record.layers
        kept = [stored for of in layers for stored in store.repo.version_of(of).objects if stored.kind == damage]
    found = next(stored for stored in kept if stored.shard == rank)
    file = next((path / "objects").rglob(found.id))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
