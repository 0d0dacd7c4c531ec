"""The programs whose commits are collected: behind a saver that was told what to keep, and under one that was not."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import layerstore
from layerstore import Keep
from layerstore.live.saver import collector
from tests.live.faulty import RUN, STEPS
from tests.live.tiny import build, done, told, train

KEPT = 2
LOST_RUN = "lost"
OTHER = 32
"""How wide the model of that run is: so it shares nothing with the other's."""


def collected(options: Any) -> None:
    """
    Save at every step and keep two; then resume a run that was not told from an old step, and take that away.

    Objects of a collected commit are too young to go in earnest: here nobody else writes.
    """
    vars(collector)["GRACE_SECONDS"] = 0
    engine = build()
    with layerstore.attach(engine, options["store"], run=RUN, policy="parity", keep=Keep(last=KEPT, every=3)) as saver:
        train(engine, STEPS, saver=saver, save_at=range(STEPS + 1))
        saver.wait()
        told(saver)

    engine = build(OTHER)
    with layerstore.attach(engine, options["store"], run=LOST_RUN) as saver:
        train(engine, 3, saver=saver, save_at=(1, 2, 3), name=LOST_RUN)
    engine = build(OTHER)
    layerstore.resume(engine, options["store"], run=LOST_RUN, step=2, must_exist=True)
    with layerstore.attach(engine, options["store"], run=LOST_RUN, policy="parity") as saver:
        if dist.get_rank() == 0:
            with layerstore.open(options["store"]) as store:
                store.gc(Keep(every=3), runs=[LOST_RUN], grace_seconds=0)
        dist.barrier()
        for step in (3, 4, 5):
            train(engine, step, saver=saver, save_at=(step,), name=LOST_RUN)
            saver.wait()
        told(saver, LOST_RUN)
    done()
