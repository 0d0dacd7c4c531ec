"""The programs of ranks that save to several levels: the first takes each save, the others follow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

import layerstore
from layerstore import Keep
from layerstore.live.saver import background, collector
from tests.forked import tell
from tests.live.tiny import build, done, told, train

STEPS = 7
RUN = "run"


def _settle(options: Any) -> list[str]:
    """Use a cache of this test's own; return the levels."""
    os.environ["LAYERSTORE_CACHE_DIR"] = options["cache"]
    background.PATIENCE_SECONDS = 0.5
    collector.GRACE_SECONDS = 0.0
    found: list[str] = options["levels"]
    return found


def begun(options: Any) -> None:
    """Save the first steps to all levels, which hold nothing yet; then lose some, and save one step more."""
    levels = _settle(options)
    engine = build()
    assert layerstore.resume(engine, levels, run=RUN) is None
    with layerstore.attach(engine, levels, run=RUN, keep=Keep(last=2), durable="remote") as saver:
        for step in range(1, options["until"] + 1):
            train(engine, step, saver=saver, save_at=(step,))
            saver.wait()
    told(saver)
    done()


def broken(options: Any) -> None:
    """Save two steps; then every level of *options* is broken, and two more are saved."""
    levels = _settle(options)
    engine = build()
    with layerstore.attach(engine, levels, run=RUN) as saver:
        train(engine, 2, saver=saver, save_at=(1, 2))
        saver.wait()
        _followed(saver)
        if dist.get_rank() == 0:
            for level in options["broken"]:
                Path(level).rename(f"{level}.gone")
                Path(level).write_text("not a folder any more")
        dist.barrier()
        train(engine, 4, saver=saver, save_at=(3, 4))
        saver.wait()
        _followed(saver)
        told(saver)
        tell("killed")
        os._exit(1)  # no close: the process dies with what it has


def _followed(saver: layerstore.Saver) -> None:
    """Wait until all that was saved was tried to be sent, on rank 0, which sends it."""
    if saver._collector is not None:
        saver._collector.wait()


def requeued(options: Any) -> None:
    """Go on from what the levels have, to the end, saving at every step."""
    levels = _settle(options)
    engine = build()
    resumed = layerstore.resume(engine, levels, run=RUN, must_exist=True)
    assert resumed is not None
    tell("resumed", step=resumed.step)
    with layerstore.attach(engine, levels, run=RUN, durable="remote") as saver:
        train(engine, STEPS, saver=saver, save_at=range(STEPS + 1))
        saver.wait()
    told(saver)
    done()
