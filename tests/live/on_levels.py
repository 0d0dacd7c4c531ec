"""The programs of ranks that save to several levels: the first takes each save, the others follow."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import layerstore
from layerstore import Keep
from layerstore.live.saver import background, collector, sending
from layerstore.live.saver.sending import Sender
from tests.forked import tell
from tests.live.tiny import RUN, STEPS, begin, build, done, resumed, to_the_end, told, train


def _settle(options: Any) -> list[str]:
    """Use a cache of this test's own; return the levels."""
    os.environ["LAYERSTORE_CACHE_DIR"] = options["cache"]
    background.PATIENCE_SECONDS = 0.5
    collector.GRACE_SECONDS = 0.01  # with none, nobody may be writing
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
    assert saver._following.wait(60.0)


def requeued(options: Any) -> None:
    """Go on from what the levels have, to the end, saving at every step."""
    levels = _settle(options)
    to_the_end(resumed(levels), levels, durable="remote")
    done()


def on_nodes(options: Any) -> None:
    """Save the first steps; each rank is a node, with a first level and a cache of its own."""
    keep = Keep(last=options["keep"]) if "keep" in options else None
    until, pin = options["until"], options.get("pin", "")
    if "slow" in options:
        _delay(options)
    begin(_as_node(options), until=until, save_at=range(until + (not pin)), pin=pin, keep=keep, **options["saver"])
    done()


def _delay(options: Any) -> None:
    """Let all ranks but the first copy slowly, and the first act late on what it has seen of parts."""
    copy, look = vars(sending)["copy_share"], vars(sending)["parts_of"]

    def copied(*arguments: Any) -> None:
        time.sleep(options["slow"] * bool(dist.get_rank()))
        copy(*arguments)

    def looked(*arguments: Any) -> Any:
        found = look(*arguments)
        time.sleep(options.get("looks_late", 0.0))
        return found

    vars(sending).update(copy_share=copied, parts_of=looked)  # in these processes alone


def alone(options: Any) -> None:
    """Save the first steps to a store that both ranks see."""
    engine = build()
    with layerstore.attach(engine, _settle(options), run=RUN, **options["saver"]) as saver:
        train(engine, options["until"], saver=saver, save_at=range(STEPS))
    done()


def more_on_nodes(options: Any) -> None:
    """Go on from the nodes' levels, save two steps that are never sent, and die."""
    levels = _as_node(options)
    Sender._copy = lambda *_: None  # type: ignore[method-assign] # in these processes alone
    engine = build()
    assert layerstore.resume(engine, levels, run=RUN, must_exist=True) is not None
    with layerstore.attach(engine, levels, run=RUN) as saver:
        train(engine, 4, saver=saver, save_at=(3, 4))
        saver.wait()
        told(saver)
        tell("killed")
        os._exit(1)


def requeued_on_nodes(options: Any) -> None:
    """Go on from what the nodes' levels and the others have, to the end, saving at every step."""
    levels = _as_node(options)
    to_the_end(resumed(levels), levels, **options["saver"])
    done()


def _as_node(options: Any) -> list[str]:
    near, *others = _settle(options)
    os.environ["LAYERSTORE_CACHE_DIR"] = f"{options['cache']}/{dist.get_rank()}"
    return [f"{near}{dist.get_rank()}", *others]


def interrupted_on_nodes(options: Any) -> None:
    """Save at every step; the level behind is away during some, and all saves come there in the end."""
    levels = _as_node(options)
    behind, aside = Path(levels[1]), Path(f"{levels[1]}.away")
    engine = build()
    with layerstore.attach(engine, levels, run=RUN, durable="remote") as saver:
        train(engine, 2, saver=saver, save_at=(1, 2))
        saver.wait()
        if dist.get_rank() == 0:
            behind.rename(aside)
        dist.barrier()
        train(engine, 4, saver=saver, save_at=(3, 4))
        try:
            saver.wait()
        except layerstore.StorageIO as exc:
            tell("late", why=str(exc))
        dist.barrier()
        if dist.get_rank() == 0:
            aside.rename(behind)
        train(engine, STEPS, saver=saver, save_at=range(5, STEPS + 1))
        while saver.status().collection_error:
            time.sleep(0.1)
        dist.barrier()
        saver.wait()
    told(saver)
    done()
