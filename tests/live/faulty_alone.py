"""The program whose last rank alone cannot do what all are asked to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist

import layerstore
from layerstore.live.pointer_files import checkpoint
from layerstore.policy import Save
from layerstore.store import Store
from layerstore.tree import Tree
from tests.live.tiny import RUN, STEPS, Engine, Faults, attempt, build, done, fail, told, train

CAPTURE = "layerstore.live.deepspeed.capture.share_of"
LOOK_UP = "layerstore.live.deepspeed.checkpoint_engine.composition_of"
PLAN = "layerstore.live.pointer_files.plan_ranks"
TRAINERS = "layerstore.live.pointer_files._write_files"
READ = "layerstore.live.deepspeed.load.RankLoad"


def alone(options: Any) -> None:
    """Save and load, each in every way at first with one rank that cannot; then train on to the end."""
    out, faults = Path(options["out"]), Faults()
    with Store(options["store"], hook=faults) as store:
        other = build(hidden=32)
        with layerstore.attach(other, store, run="other"):
            other.save_checkpoint(str(out / "other"))
        engine = build()
        with layerstore.attach(engine, store, run=RUN) as saver:
            train(engine, 1, saver=saver, save_at=(1,))
            saver.wait()
            train(engine, 2)
            with fails(CAPTURE):
                attempt(saver.save, "capture")
                attempt(lambda: engine.save_checkpoint(str(out / "none")), "capture, by the engine")
            train(engine, 3, saver=saver, save_at=(3,))
            faults.on("create", "_model_states", fail(errno.EIO), rank=1)
            attempt(lambda: engine.save_checkpoint(str(out / "torn")), "pointer")
            faults.clear()
            engine.save_checkpoint(str(out / "run"))
            saver.wait()
            for name, target in {"look up": LOOK_UP, "read": READ}.items():
                with fails(target):
                    attempt(lambda: engine.load_checkpoint(str(out / "run")), name)
            with fails(PLAN), patch(TRAINERS, return_value=True):
                attempt(lambda: checkpoint(store, f"{RUN}@3"), "folder")
            with cut(out / "run"):
                attempt(lambda: engine.load_checkpoint(str(out / "run")), "cut")
            attempt(lambda: engine.load_checkpoint(str(out / "other"), tag="global_step0"), "other")
            train(engine, 4)
            saver.save()
            train(engine, STEPS)
            told(saver)
            attempt(lambda: engine.load_checkpoint(str(out / "run")), "at last")
            train(engine, 4, saver=saver, save_at=(4,), name="again")
        decided(engine, store)
    done()


class Wayward:
    """A policy that fails on the last rank, and then says something else there than on the first."""

    name = "wayward"
    parameters: ClassVar[dict[Tree, Tree]] = {}

    def __init__(self) -> None:
        self.fails = False
        self.differs = False

    def due(self, save: Save) -> tuple[str, ...]:
        """Return every layer, and on the last rank as is told."""
        if dist.get_rank() == 1 and self.fails:
            raise RuntimeError("made up")
        return save.layers[1:] if dist.get_rank() == 1 and self.differs else save.layers


def decided(engine: Engine, store: Store) -> None:
    """Save under a policy that the ranks do not agree on; then under the same one, when they do."""
    policy = Wayward()
    with layerstore.attach(engine, store, run="decided", policy=policy) as saver:
        train(engine, 6, saver=saver, save_at=(6,), name="decided")
        train(engine, 7, name="decided")
        policy.fails = True
        attempt(saver.save, "policy")
        policy.fails, policy.differs = False, True
        attempt(saver.save, "undecided")
        policy.differs = False
        saver.save()


def accumulated(options: Any) -> None:
    """Accumulate as Accelerate does, which steps only at the end; try to save between batches and after updates."""
    engine = build(accumulated=2)
    with layerstore.attach(engine, options["store"], run=RUN) as saver:
        for number in (1, 2, 3):
            for is_last in (False, True):
                engine.set_gradient_accumulation_boundary(is_last)
                engine.backward(engine(torch.randn(2, 5).to(torch.bfloat16)))
                if not is_last:
                    attempt(saver.save, f"within {number}")
                if not is_last and number > 1:
                    attempt(lambda: engine.load_checkpoint(options["out"]), f"load within {number}")
            engine.step()
            attempt(saver.save, f"after {number}")
            engine.save_checkpoint(options["out"])
    done()


@contextmanager
def fails(target: str) -> Iterator[None]:
    """Let *target* fail on the last rank."""
    if dist.get_rank() == 1:
        with patch(target, side_effect=RuntimeError("made up")):
            yield
    else:
        yield


@contextmanager
def cut(folder: Path) -> Iterator[None]:
    """Cut the last rank's pointer short."""
    path = next(folder.rglob("zero_pp_rank_1_*_model_states.pt"))
    data = path.read_bytes()
    dist.barrier()
    if dist.get_rank() == 1:
        path.write_bytes(data[:100])
    yield
    dist.barrier()
    if dist.get_rank() == 1:
        path.write_bytes(data)
    dist.barrier()
