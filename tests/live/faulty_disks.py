"""The programs whose ranks meet bad disks: full, slow, broken, gone, read-only, or not the same."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import layerstore
from layerstore.live.saver.settings import Mode
from layerstore.store import Store
from tests.live.faulty import RUN, STEPS
from tests.live.tiny import Faults, attempt, build, done, fail, told, train


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
            with layerstore.attach(engine, store, run=name.replace(" ", "-").replace("'", "")) as saver:
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


def refused(options: Any) -> None:
    """Attach to what cannot be attached to."""
    engine = build()
    for name, paths in options["stores"].items():
        path = paths[dist.get_rank()]
        attempt(lambda path=path: layerstore.attach(engine, path, run=RUN), name)  # type: ignore[misc]
        attempt(lambda path=path: layerstore.resume(engine, path, run=RUN), f"{name}, resume")  # type: ignore[misc]
    train(engine, STEPS)
    done()
