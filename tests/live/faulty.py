"""The programs that the ranks of the fault tests run: each trains tiny engines into a store, and is disturbed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import layerstore
from layerstore import Keep
from layerstore.errors import StorageIO
from layerstore.live.saver import background, collector
from layerstore.store import Store
from tests.forked import tell
from tests.live.tiny import RUN, STEPS, Faults, attempt, build, done, fail, hold, resumed, slow, to_the_end, told, train


def undisturbed(options: Any) -> None:
    """Train to the end without any save."""
    train(build(), STEPS)
    done()


def killed(options: Any) -> None:
    """Save at every step; the save of step 4 stops where *options* say, and waits there to be killed."""
    faults = Faults()
    engine = build()
    background.PATIENCE_SECONDS = 0.5
    with Store(options["store"], hook=faults) as store:
        saver = layerstore.attach(engine, store, run=RUN, policy=options["policy"])
        train(engine, 3, saver=saver, save_at=(1, 2, 3))
        saver.wait()
        for rank in options["ranks"]:
            faults.on(options["operation"], options["part"], hold(options["part"]), rank=rank)
        train(engine, STEPS, saver=saver, save_at=(4,))
        saver.wait()  # it never comes to an end


def watched(options: Any) -> None:
    """Save at every step, each as soon as the test asks for it by a file of that name."""
    engine = build()
    with layerstore.attach(engine, options["store"], run=RUN) as saver:
        for step in range(1, options["saves"] + 1):
            while not Path(options["asked"], str(step)).exists():
                time.sleep(0.05)
            train(engine, step, saver=saver, save_at=(step,))
            saver.wait()
            tell("quiet", step=step)
    done()


def requeued(options: Any) -> None:
    """Go on from wherever the store says, to the end, saving at every step."""
    with layerstore.open(options["store"]) as store:
        to_the_end(resumed(store), store, policy=options["policy"])
    done()


def rolled_back(options: Any) -> None:
    """Train to step 6, go back to step 2, save steps 3 and 4 in other ways, and wait to be killed while saving 5."""
    faults = Faults()
    with Store(options["store"], hook=faults) as store:
        engine = build()
        with layerstore.attach(engine, store, run=RUN, policy=options["policy"]) as saver:
            train(engine, 6, saver=saver, save_at=range(7), name="first")
        engine = build()
        layerstore.resume(engine, store, run=RUN, step=2)
        saver = layerstore.attach(engine, store, run=RUN, policy=options["policy"])
        torch.manual_seed(100)  # what is trained now is not what was trained before
        train(engine, 4, saver=saver, save_at=(3, 4), name="second")
        saver.wait()
        faults.on("write", "/tmp/", hold("write"))
        train(engine, STEPS, saver=saver, save_at=(5,), name="second")


def begun_anew(options: Any) -> None:
    """Begin again from nothing, in the same run."""
    engine = build()
    with layerstore.attach(engine, options["store"], run=RUN, policy=options["policy"]) as saver:
        train(engine, 3, saver=saver, save_at=(1, 2), name="anew")
    done()


def back_and_forth(options: Any) -> None:
    """Go back under an attached saver, to below a save that was given up: its number is given again."""
    faults = Faults()
    with Store(options["store"], hook=faults) as store:
        engine = build()
        with layerstore.attach(engine, store, run=RUN, policy="parity") as saver:
            train(engine, 2, saver=saver, save_at=(1, 2))
            saver.wait()
            faults.on("write", "/tmp/", fail(errno.EIO), rank=1)
            train(engine, 3, saver=saver, save_at=(3,))
            saver.wait()
            faults.clear()
            layerstore.resume(engine, store, run=RUN, step=1)
            train(engine, 4, saver=saver, save_at=(2, 3, 4), name="second")
        told(saver)
    done()


def ended(options: Any) -> None:
    """End without closing the saver, as *options* say, while a save is on its way to a slow disk."""
    faults = Faults().on("write", "/tmp/", slow(0.02))
    engine = build()
    saver = layerstore.attach(engine, Store(options["store"], hook=faults), run=RUN)
    train(engine, 2, saver=saver, save_at=(2,))
    if options["how"] == "exit":
        sys.exit(3)
    if options["how"] == "exception":
        raise RuntimeError("the training has a bug")
    dist.destroy_process_group()


def aborted(_: Any) -> None:
    """The last rank is aborted, and the others have much to say after that."""
    if dist.get_rank() == 1:
        os.abort()
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    sys.stdout.write("others have the last word\n" * 1000)
    sys.stdout.flush()
    os._exit(0)


def left_alone(options: Any) -> None:
    """An exception comes out of the block on the first rank, while the other one is gone."""
    background.PATIENCE_SECONDS = 0.5
    faults = Faults().on("link", "/parts/", hold("part"), rank=1)
    engine = build()
    started = time.monotonic()
    try:
        with layerstore.attach(engine, Store(options["store"], hook=faults), run=RUN) as saver:
            train(engine, 2, saver=saver, save_at=(2,))
            if dist.get_rank() == 1:
                time.sleep(0.5)
                os._exit(0)
            started = time.monotonic()
            raise ValueError("on one rank")
    except ValueError:
        tell("left", seconds=time.monotonic() - started)
        told(saver)
    os._exit(0)


def together_out(options: Any) -> None:
    """The same exception comes out of the block on all ranks, while a save is on its way."""
    faults = Faults().on("write", "/tmp/", slow(0.02), rank=1)
    engine = build()
    try:
        with layerstore.attach(engine, Store(options["store"], hook=faults), run=RUN) as saver:
            train(engine, 2, saver=saver, save_at=(2,))
            raise ValueError("on all ranks")
    except ValueError:
        told(saver)
    done()


def closed(options: Any) -> None:
    """Close twice, save afterwards, attach twice, and train on without a saver."""
    engine = build()
    before = engine.checkpoint_engine
    saver = layerstore.attach(engine, options["store"], run=RUN)
    attempt(lambda: layerstore.attach(engine, options["store"], run=RUN), "attach again")
    train(engine, 3, saver=saver, save_at=(2, 3))
    saver.close()
    saver.close()
    saver.wait()
    attempt(saver.save, "save after close")
    assert engine.checkpoint_engine is before
    assert not engine.optimizer.optimizer._optimizer_step_pre_hooks
    engine.save_checkpoint(options["beside"])
    train(engine, STEPS)
    with layerstore.attach(engine, options["store"], run="other") as second:
        second.save(pin="end")
    told(saver)
    _closed_by_half(engine, options["store"])
    done()


def _closed_by_half(engine: Any, path: str) -> None:
    """Close a saver while one rank cannot read what it has saved, and attach the next."""

    def unreadable() -> None:
        raise StorageIO("the disk does not answer", errno=errno.EIO, filename="commits")

    with Store(path) as store:
        saver = layerstore.attach(engine, store, run="half")
        saver.save()
        saver.wait()
        with pytest.MonkeyPatch.context() as patched:  # no hook stands before reads
            if dist.get_rank() == 1:
                patched.setattr(store.repo.records, "refresh", unreadable)
            saver.close()
        with layerstore.attach(engine, store, run="half") as again:
            again.save()


# -- commits that are collected ------------------------------------------------------------------------------------

KEPT = 2
LOST_RUN = "lost"
PUSHED_RUN = "pushed"
OTHER = 32
"""How wide the model of that run is: so it shares nothing with the other's."""


def collected(options: Any) -> None:
    """
    Save at every step and keep two; then resume a run that was not told from an old step, and take that away.

    Then push another run while it trains, and keep one commit here.

    Objects of a collected commit are too young to go in earnest: here nobody else writes.
    """
    grace, vars(collector)["GRACE_SECONDS"] = collector.GRACE_SECONDS, 0
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

    engine = build(OTHER)
    remote = {"push": options["bucket"], "durable": "remote"}
    # Saves go on beside these collections: without a grace, one may take what a save has yet to name.
    vars(collector)["GRACE_SECONDS"] = grace
    with layerstore.attach(
        engine, options["store"], run=PUSHED_RUN, policy="parity", keep=Keep(last=1), **remote
    ) as saver:
        train(engine, 4, saver=saver, save_at=(1, 2, 3, 4), name=PUSHED_RUN)
        saver.wait()
        told(saver, PUSHED_RUN)
    done()
