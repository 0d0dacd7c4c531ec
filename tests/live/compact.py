"""The programs whose ranks save compactly: every save is also left by DeepSpeed itself, to be ingested."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import layerstore
from layerstore.history import resolve
from layerstore.model import Kind
from layerstore.store import Store
from tests.forked import tell
from tests.live.tiny import Engine, Faults, adamw, attempt, build, done, fail, flip, plainly, step, told, train

RUNS = {"delta8": "latest", "delta4": "parity"}
"""The policy of the run in each precision."""

EXACT_EVERY = 3
RESTARTED_AT = 5
SAVES = 8
EXACTLY = 7
"""Saved exactly although it was not its turn."""

FROZEN = "layers.3"
"""The layer that is not trained while saves are disturbed."""

LAST = 10


def saved(options: Any) -> None:
    """Save every step in each precision, and restart in between; then resume from several of the saves."""
    refused(build(), options["store"])
    for name, policy in RUNS.items():
        engine = build()
        with attached(engine, options["store"], name) as saver:
            save_each(engine, saver, range(1, RESTARTED_AT + 1), options["out"], name)
        train(engine, LAST, name=f"{name}, undisturbed")
        engine = build()
        resumed(engine, options["store"], name)
        with attached(engine, options["store"], name) as saver:
            save_each(engine, saver, range(RESTARTED_AT + 1, SAVES + 1), options["out"], name)
        train(engine, LAST, name=name)
        if policy == "latest":
            resumed_from(engine, options["store"], name)
    done()


def attached(engine: Engine, store: str, name: str) -> Any:
    """Attach a saver of the run *name*."""
    return layerstore.attach(
        engine,
        store,
        run=name,
        policy=RUNS[name],
        precision=name,  # type: ignore[arg-type]  # it is one
        exact_every=EXACT_EVERY,
    )


def save_each(engine: Engine, saver: Any, steps: Iterable[int], out: str, name: str) -> None:
    """Train to each of *steps*, and save it, through *saver* and by DeepSpeed."""
    for number in steps:
        train(engine, number, name=name)
        found = saver.save(
            client_state={"epoch": number}, precision="exact" if number == EXACTLY and name == "delta4" else None
        )
        tell("saved", step=number, due=found.layers_due, compact=found.layers_compact, name=name)
        with plainly(engine):
            engine.save_checkpoint(str(Path(out) / name), client_state={"epoch": number})


def resumed(engine: Engine, store: str, name: str, **named: Any) -> None:
    """Resume, and tell from where."""
    found = layerstore.resume(engine, store, run=name, must_exist=True, **named)
    assert found is not None
    tell("resumed", step=found.step, name=name, asked=named, notes=found.notes)


def resumed_from(engine: Engine, store: str, name: str) -> None:
    """Resume from an exact save that compact ones followed, and from the newest exact one; train each to the end."""
    resumptions: dict[str, dict[str, Any]] = {"exact": {"step": 4}, "newest": {"exact": True}}
    for what, named in resumptions.items():
        resumed(engine, store, name, **named)
        train(engine, LAST, name=what)


def refused(engine: Engine, store: str) -> None:
    """Ask for what there is not."""
    wrong: dict[str, dict[str, Any]] = {
        "precision": {"precision": "delta9"},
        "exact_every": {"precision": "delta8", "exact_every": 0},
    }
    for name, options in wrong.items():
        attempt(partial(layerstore.attach, engine, store, run="wrong", **options), name)
    train(engine, 1, name="wrong")
    with layerstore.attach(engine, store, run="wrong") as saver:
        unknown: Any = "x"
        attempt(lambda: saver.save(precision=unknown), "of a save")
        attempt(lambda: saver.save(precision="exact" if dist.get_rank() == 0 else "delta8"), "not the same")


def disturbed(options: Any) -> None:
    """Lose a compact save and an exact one; then save what refers to damage, and what cannot be coded."""
    faults, engine = Faults(), build(optimizer_of=partly_frozen)
    with Store(options["store"], hook=faults) as store:
        with layerstore.attach(engine, store, run="run", precision="delta8", exact_every=EXACT_EVERY) as saver:
            for number in range(1, 6):
                if number in {3, 4}:
                    faults.on("write", "/tmp/", fail(errno.EIO), rank=1)
                one_more(engine, saver)
                faults.clear()
            if dist.get_rank() == 0:
                flip_master(store, options["store"])
            dist.barrier()
            one_more(engine, saver)
            one_more(engine, saver)
            spoil_moment(engine)
            one_more(engine, saver)
            one_more(engine, saver)
        told(saver)
        train(engine, LAST)
        resumed(engine, options["store"], "run", step=2)
        train(engine, LAST, name="again")
    done()


def partly_frozen(model: nn.Module) -> torch.optim.Optimizer:
    """Freeze a layer, and return the usual optimizer of the others."""
    model.get_submodule(FROZEN).requires_grad_(requires_grad=False)
    return adamw(model)


def spoil_moment(engine: Engine) -> None:
    """Make a number of the last rank's second moments infinite: those weights will stand still."""
    if dist.get_rank() == 1:
        state = next(iter(engine.optimizer.optimizer.state.values()))
        state["exp_avg_sq"][0] = torch.inf


def one_more(engine: Engine, saver: Any) -> None:
    """Train one step, save it, and wait for what becomes of that."""
    step(engine)
    found = saver.save()
    saver.wait()
    tell("saved", step=found.step, due=found.layers_due, compact=found.layers_compact, name="")


def flip_master(store: Store, path: str) -> None:
    """Flip a byte of the last rank's masters in the newest commit."""
    newest = resolve(store.repo, "run").record
    flip(Path(path), "run", Kind.MASTER, rank=1, step=newest.step)
