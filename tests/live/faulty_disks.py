"""The programs whose ranks meet bad disks: full, slow, broken, gone, read-only, or not the same."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

import layerstore
from layerstore.live.ranks import exchange
from layerstore.live.saver import saver as saving
from layerstore.live.saver import snapshot
from layerstore.live.saver.options import Mode
from layerstore.publish import SaveTiming
from layerstore.store import Store
from layerstore.transformers import checkpoint
from tests.forked import tell
from tests.live.tiny import RUN, STEPS, Faults, attempt, build, done, fail, told, train


def filled_up(options: Any) -> None:
    """Save to a disk that is full from step 3 to 4: almost, to the last byte, and while saves are synchronous."""
    ballast = Path(options["ballast"])
    ways: tuple[tuple[str, int, Mode], ...] = (
        ("almost", 65536, "async"),
        ("full", 0, "async"),
        ("sync", 65536, "sync"),
    )
    for name, room, mode in ways:
        engine = build()
        saver = layerstore.attach(engine, options["store"], run=name, policy="parity", mode=mode)
        train(engine, 2, saver=saver, save_at=(1, 2), name=name)
        saver.wait()
        if dist.get_rank() == 0:
            fill(ballast, room)
        dist.barrier()
        if mode == "sync":
            for number in (3, 4):
                train(engine, number, name=name)
                attempt(saver.save, name)
        else:
            train(engine, 4, saver=saver, save_at=(3, 4), name=name)
        saver.wait()
        told(saver, name)
        dist.barrier()
        if dist.get_rank() == 0:
            ballast.unlink()
        dist.barrier()
        train(engine, STEPS, saver=saver, save_at=(5, 6), name=name)
        saver.close()
    done()


def fill(ballast: Path, room: int) -> None:
    """Fill the disk with *ballast*, but for *room* bytes."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as exc:
                if exc.errno != errno.ENOSPC:
                    raise
        os.fsync(file.fileno())
        if room:
            file.truncate(file.tell() - room)


def broken(options: Any) -> None:
    """Save step 1, then step 2 with one thing broken, then step 3 again without."""
    path = Path(options["store"])
    faults = Faults()
    rules: dict[str, Callable[[], object]] = {
        "one rank's disk": lambda: faults.on("write", "/tmp/", fail(errno.EIO), rank=1),
        "one rank's part": lambda: faults.on("link", "/parts/", fail(errno.EIO), rank=1),
        "one rank's objects": lambda: faults.on("link", "/parts/", lost(path), rank=1),
        "record folder": lambda: faults.on("link", "/commits/", fail(errno.EACCES), rank=0),
        "store gone": lambda: move(path, path.with_name("gone")),
    }
    with Store(path, hook=faults) as store:
        for name, rule in rules.items():
            engine = build()
            run, hooks = name.replace(" ", "-").replace("'", ""), hooks_of(name)
            with layerstore.attach(engine, store, run=run, on_saved=hooks[0], on_failed=hooks[1]) as saver:
                train(engine, 1, saver=saver, save_at=(1,), name=name)
                saver.wait()
                dist.barrier()
                rule()
                dist.barrier()
                train(engine, 2, saver=saver, save_at=(2,), name=name)
                saver.wait()
                told(saver, name)
                dist.barrier()
                faults.clear()
                move(path.with_name("gone"), path)
                dist.barrier()
                train(engine, 3, saver=saver, save_at=(3,), name=name)
    done()


def hooks_of(name: str) -> list[Callable[[SaveTiming], None]]:
    """Return what tells of each save that became a commit, and of each that came to nothing."""

    def hook(kind: str, timing: SaveTiming) -> None:
        tell(kind, name=name, step=timing.step, commit=timing.commit, failure=timing.failure)

    return [partial(hook, kind) for kind in ("on_saved", "on_failed")]


def lost(store: Path) -> Callable[[Path], None]:
    """Return what removes all objects that were written since now."""
    known = set((store / "objects").rglob("*"))

    def lose(_: Path) -> None:
        new = [path for path in set((store / "objects").rglob("*")) - known if path.is_file()]
        inodes = {path.stat().st_ino for path in new}
        for path in (*new, *(store / "tmp").iterdir()):  # they have another name there until the end
            with contextlib.suppress(FileNotFoundError):  # the other rank's come and go
                if path.stat().st_ino in inodes:
                    path.unlink()

    return lose


def move(source: Path, target: Path) -> None:
    """Let the first rank rename *source*, if it is there."""
    if dist.get_rank() == 0 and source.exists():
        source.rename(target)


GLOO_SECONDS_MAX = 4
"""How long the ranks wait for each other before they give training up; half an hour by default."""

STUCK_SECONDS = GLOO_SECONDS_MAX + 3
WIDE = 256
"""So wide a model's save does not fit into the smallest buffer."""


def stuck_on_one(options: Any) -> None:
    """One rank's disk stands still while saves pile up; then before an update, and at last as if it were dead."""
    vars(dist)["new_group"] = partial(dist.new_group, timeout=timedelta(seconds=GLOO_SECONDS_MAX))
    distributed_c10d._set_pg_timeout(timedelta(seconds=GLOO_SECONDS_MAX))
    vars(exchange)["_SILENT_SECONDS_MAX"] = 1
    faults = Faults()
    with Store(options["store"], hook=faults) as store:
        piled_up(store, faults)
        before_an_update(store, faults, "slow", WIDE)
        vars(snapshot)["STALLED_SECONDS_MAX"] = 1
        before_an_update(store, faults, "dead", 2 * WIDE)  # another width: equal objects would not be written
    done()


def piled_up(store: Store, faults: Faults) -> None:
    """Save by a policy that asks all ranks, while two saves wait for one rank's disk; then when it works again."""
    vars(saving)["DISK_SECONDS_MAX"] = 2
    engine = build()
    with layerstore.attach(engine, store, run="piled", policy=layerstore.Drift(threshold=0)) as saver:
        train(engine, 1, saver=saver, save_at=(1,), name="piled")
        saver.wait()
        go_on = stuck(faults)
        train(engine, 5, saver=saver, save_at=(2, 3, 4), name="piled")
        go_on.set()
        saver.wait()
        train(engine, STEPS, saver=saver, save_at=(STEPS,), name="piled")
        saver.wait()
        told(saver, "piled")


def before_an_update(store: Store, faults: Faults, name: str, width: int) -> None:
    """Save more than the buffer holds: what remains is copied as the disk takes it, and the update waits for that."""
    engine = build(width)
    with layerstore.attach(engine, store, run=name, host_buffer=1_000_000) as saver:
        go_on = stuck(faults)
        threading.Timer(STUCK_SECONDS, go_on.set).start()
        train(engine, 3, saver=saver, save_at=(1,), name=name)
        go_on.wait()
        saver.wait()
        train(engine, 4, saver=saver, save_at=(4,), name=name)
        saver.wait()
        told(saver, name)


def stuck(faults: Faults) -> threading.Event:
    """Make the last rank's disk stand still until the event is set."""
    go_on = threading.Event()
    faults.clear()

    def stay(_: Path) -> None:
        go_on.wait()

    faults.on("write", "/tmp/", stay, rank=1)
    return go_on


def first_launch(options: Any) -> None:
    """Resume and attach where there is no store yet; then again, with names and paths that are mistyped."""
    path = Path(options["store"])
    engine = build()
    attempt(lambda: layerstore.resume(engine, path, run=RUN, must_exist=True), "must exist")
    attempt(lambda: layerstore.attach(engine, path, run=RUN, create=False), "create=False")
    attempt(lambda: layerstore.attach(engine, path, run="a/b"), "run")
    attempt(lambda: layerstore.resume(engine, "s3://", run=RUN), "URL")
    tell("seen", there=path.exists(), resumed=layerstore.resume(engine, path, run=RUN), folder=checkpoint(path, RUN))
    with layerstore.attach(engine, path, run=RUN) as saver:
        train(engine, 2, saver=saver, save_at=(2,))
    for run in ("rnu", "new"):
        tell("seen", resumed=layerstore.resume(engine, path, run=run), folder=checkpoint(path, run))
    attempt(lambda: layerstore.resume(engine, path, run="rnu", must_exist=True), "no such run")
    layerstore.resume(engine, path, run=RUN)
    with layerstore.attach(engine, path, run=RUN) as saver:
        train(engine, 4, saver=saver, save_at=(4,))
    layerstore.attach(build(), path, run=RUN).close()
    done()


def refused(options: Any) -> None:
    """Attach to what cannot be attached to."""
    engine = build()
    for name, paths in options["stores"].items():
        path = paths[dist.get_rank()]
        attempt(lambda path=path: layerstore.attach(engine, path, run=RUN), name)  # type: ignore[misc]
        attempt(lambda path=path: layerstore.resume(engine, path, run=RUN), f"{name}, resume")  # type: ignore[misc]
    train(engine, STEPS)
    done()
