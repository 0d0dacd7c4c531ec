"""
The programs that load folders in every way that DeepSpeed has: its own shards, and the pointers of the same states.

Also folders that are still being written, and what those say to readers who know nothing of layerstore.
"""

from __future__ import annotations

import errno
import runpy
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import layerstore
from layerstore.live import binding
from layerstore.store import Store
from tests.deepspeed.scenarios import SCENARIO_OF, Scenario
from tests.deepspeed.training import built_engine, train_step
from tests.forked import tell
from tests.live.cases import LOADED, WAYS
from tests.live.tiny import Engine, Faults, attempt, build, done, fail, plainly, slow, train


def ways(options: Any) -> None:
    """Load shards without layerstore, then pointers to the same states; and note what each load makes of an engine."""
    for name in LOADED:
        scenario, out = SCENARIO_OF[name], Path(options["out"], name)
        with built_engine(scenario) as engine:
            for step in (1, 2):
                train_step(scenario, engine, step=step)
                engine.save_checkpoint(str(out / "shards"), client_state={"epoch": step})
            load_all(scenario, engine, out, folder="shards")
            back(engine, out)
            with layerstore.attach(engine, options["store"], run=name) as saver:
                engine.save_checkpoint(str(out / "pointers"), client_state={"epoch": 1})
                train_step(scenario, engine, step=2)
                engine.save_checkpoint(str(out / "pointers"), client_state={"epoch": 2})
                saver.wait()  # what goes around the saver, as `back` does, would tear the save
                load_all(scenario, engine, out, folder="pointers")
            assert "load_checkpoint" not in vars(engine)
    done()


def load_all(scenario: Scenario, engine: Engine, out: Path, *, folder: str) -> None:
    """Load *folder* in every way into an engine at step 1, each time followed by a step of training."""
    for way, arguments in WAYS.items():
        back(engine, out)
        path, client_state = engine.load_checkpoint(str(out / folder), **arguments)
        dump = out / f"from_{folder}" / way
        with plainly(engine):
            engine.save_checkpoint(str(dump))
        client_state.pop("frozen_param_fragments", None)  # they are among what was dumped, and padded
        entry = train_step(scenario, engine, step=3)
        found = {"path": Path(path).name, "client_state": client_state, "entry": entry}
        torch.save(found, dump / f"returned_{dist.get_rank()}.pt")


def back(engine: Engine, out: Path) -> None:
    """Let *engine* be at step 1, by nothing of ours."""
    with plainly(engine):
        engine.load_checkpoint(str(out / "shards"), tag="global_step1")


def in_turn(options: Any) -> None:
    """Load where DeepSpeed lets one rank after the other load its optimizer's state."""
    scenario = replace(SCENARIO_OF["odd_sizes"], zero={"pipeline_loading_checkpoint": True})
    with built_engine(scenario) as engine, layerstore.attach(engine, options["store"], run="in-turn"):
        train_step(scenario, engine, step=1)
        engine.save_checkpoint(options["out"])
        train_step(scenario, engine, step=2)
        attempt(lambda: engine.load_checkpoint(options["out"]), "load")
        assert engine.global_steps == 1
    done()


def anew(options: Any) -> None:
    """Load only the weights under a saver that saves some layers at a time; then all, without closing it."""
    engine, out = build(), options["out"]
    with layerstore.attach(engine, options["store"], run="anew", policy="parity") as saver:
        train(engine, 1, saver=saver, save_at=(1,))
        engine.save_checkpoint(out)
        train(engine, 2, saver=saver, save_at=(2,))
        engine.load_checkpoint(out, load_optimizer_states=False)
        train(engine, 2, saver=saver, save_at=(2,), name="weights")
        engine.load_checkpoint(out)
        train(engine, 2, saver=saver, save_at=(2,), name="all")
    engine = build()
    with layerstore.attach(engine, options["store"], run="anew") as saver:
        tell("attached")
        engine.load_checkpoint(out)
        train(engine, 2, saver=saver, save_at=(2,), name="loaded")
    engine = build()
    with layerstore.attach(engine, options["store"], run="anew") as saver:
        train(engine, 2, saver=saver, save_at=(1, 2), name="forgotten")
        with plainly(engine):
            engine.save_checkpoint(str(Path(out) / "cut"))
        for path in Path(out, "cut").rglob(f"*rank_{dist.get_rank()}_*optim_states.pt"):
            path.write_bytes(path.read_bytes()[:100])
        hinted(lambda: engine.load_checkpoint(str(Path(out) / "cut")), "cut")
        hinted(lambda: saver.save(3), "held back")
    with layerstore.attach(engine, options["store"], run="anew") as saver:
        hinted(lambda: saver.save(3), "closed and attached again")
        engine.load_checkpoint(out)
        attempt(lambda: saver.save(3), "whole again")
    done()


def at_once(options: Any) -> None:
    """Load and resume from what another engine of the same ranks has just begun to save, on a disk with troubles."""
    out, faults = Path(options["out"]), Faults()
    one, other, third = build(), build(), build()
    with (
        Store(options["store"], hook=faults) as store,
        layerstore.attach(one, store, run="one"),
        layerstore.attach(other, store, run="other"),
    ):
        train(one, 2)
        faults.on("write", "/tmp/", slow(0.02))
        one.save_checkpoint(str(out / "one"))
        attempt(lambda: other.load_checkpoint(str(out / "one")), "load")
        alike(3, one=one, other=other)
        one.save_checkpoint(str(out / "one"))
        attempt(lambda: layerstore.resume(third, store, run="one", step=3), "resume")
        faults.clear()
        alike(4, one=one, third=third)
        stuck(one, other, out / "stuck", faults)
        fail_once(faults, "write", "/tmp/")
        train(one, 5)
        one.save_checkpoint(str(out / "lost"))
        hinted(lambda: other.load_checkpoint(str(out / "lost")), "lost")
    done()


def alike(upto: int, **engines: Engine) -> None:
    """Train *engines* up to a step on the same random numbers."""
    for name, engine in engines.items():
        torch.manual_seed(dist.get_rank())
        train(engine, upto, name=name)


def stuck(one: Engine, other: Engine, folder: Path, faults: Faults) -> None:
    """Load what the last rank's disk takes only after longer than anybody waits; then once more."""
    takes = threading.Event()

    def wait(path: Path) -> None:
        takes.wait()

    faults.on("write", "/tmp/", wait, rank=1)
    one.save_checkpoint(str(folder))
    with patch.object(binding, "LOAD_WAIT_SECONDS", 0.5):
        hinted(lambda: other.load_checkpoint(str(folder)), "stuck")
    takes.set()
    attempt(lambda: other.load_checkpoint(str(folder)), "stuck no more")
    faults.clear()


def fail_once(faults: Faults, operation: str, part: str) -> None:
    """Fail on the last rank, so that it can still say so."""

    def refuse(path: Path) -> None:
        faults.clear()
        fail(errno.EIO)(path)

    faults.on(operation, part, refuse, rank=1)


def foreign(options: Any) -> None:
    """Read a folder of pointers with what knows nothing of layerstore, and by engines that cannot."""
    folder = Path(options["out"], "folder")
    engine = build()
    with layerstore.attach(engine, options["store"], run="foreign"):
        train(engine, 1)
        engine.save_checkpoint(str(folder))
    hinted(lambda: engine.load_checkpoint(str(folder)), "no saver")
    hinted(lambda: engine.load_checkpoint(str(folder), load_optimizer_states=False), "no saver, weights")
    hinted(lambda: get_fp32_state_dict_from_zero_checkpoint(str(folder)), "get_fp32")
    if dist.get_rank() == 0:
        with patch.object(sys, "argv", ["zero_to_fp32.py", str(folder), str(folder / "weights")]):
            hinted(lambda: runpy.run_path(str(folder / "zero_to_fp32.py"), run_name="__main__"), "script")
    with (
        layerstore.attach(engine, options["store"], run="other"),
        patch.object(engine, "load_universal_checkpoint", lambda: True),
    ):
        hinted(lambda: engine.load_checkpoint(str(folder), tag="global_step1"), "universal")
    done()


def hinted(work: Callable[[], object], name: str) -> None:
    """Call *work*, which fails, and tell its error with the hint."""
    try:
        work()
    except Exception as exc:  # noqa: BLE001 - the test judges it
        tell("hinted", name=name, error=type(exc).__name__, message=str(exc), hint=getattr(exc, "hint", None))
