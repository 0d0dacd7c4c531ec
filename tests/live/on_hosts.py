"""The programs of ranks on two hosts that share a folder: each saves a tiny engine there, and one is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

import layerstore
from layerstore.live.saver import background
from layerstore.store import Store
from tests.forked import tell
from tests.live.tiny import RUN, SAVED, STEPS, Faults, build, done, hold, resumed, to_the_end, told, train


def _store(options: Any) -> str:
    """Return the store as this host sees it."""
    vars(background).update(PATIENCE_SECONDS=0.5)
    found: str = options["stores"][dist.get_rank()]
    return found


def phases(options: Any) -> None:
    """Save at every step, and tell what one save does to which of the store's folders, in the order of first times."""
    seen: list[str] = []
    faults = Faults()

    def note(operation: str, path: Path) -> None:
        phase = phase_of(operation, path, Path(_store(options)))
        if phase not in seen:
            seen.append(phase)

    engine = build()
    with Store(_store(options), hook=lambda *call: note(*call) if faults.rules else None) as store:
        with layerstore.attach(engine, store, run=RUN, policy="parity") as saver:
            train(engine, SAVED, saver=saver, save_at=range(STEPS))
            saver.wait()
            faults.on("noted", "", lambda _: None)
            train(engine, SAVED + 1, saver=saver, save_at=range(STEPS))
            saver.wait()
            faults.clear()
            train(engine, STEPS, saver=saver, save_at=range(STEPS + 1))
        told(saver)
    tell("phases", phases=seen)
    done()


def phase_of(operation: str, path: Path, store: Path) -> str:
    """Return what is done in which folder of the store, and how deep."""
    folder, *below = path.relative_to(store).parts
    return " ".join([operation, "/".join([folder, *("*" for _ in below)])])


def killed(options: Any) -> None:
    """Save at every step; at the fourth one host stops where *options* say, and waits there to be killed."""
    store = _store(options)
    is_doomed = dist.get_rank() == options["host"]
    stop = hold(options["phase"])
    faults = Faults()

    def hook(operation: str, path: Path) -> None:
        if faults.rules and phase_of(operation, path, Path(store)) == options["phase"]:
            stop(path)

    engine = build()
    saver = layerstore.attach(engine, Store(store, hook=hook), run=RUN, policy="parity")
    train(engine, SAVED, saver=saver, save_at=range(STEPS))
    saver.wait()
    if is_doomed:
        faults.on("held", "", stop)
    train(engine, STEPS, saver=saver, save_at=(SAVED + 1,))
    saver.wait()  # it never comes to an end


def requeued(options: Any) -> None:
    """Go on from wherever the store says, to the end, saving at every step."""
    with layerstore.open(_store(options)) as store:
        to_the_end(resumed(store), store, policy="parity")
    done()


def unkilled(options: Any) -> None:
    """Be ended in peace after a save, and go on: a resume from half of each of two steps is where the job goes on."""
    with layerstore.open(_store(options)) as store:
        for step in (SAVED, SAVED + 1):
            engine = build()
            with layerstore.attach(engine, store, run=f"until{step}", policy="parity") as saver:
                train(engine, step, saver=saver, save_at=range(STEPS), name="before")
            run = f"until{step}"
            to_the_end(resumed(store, run=run, name=run), store, run=run, name=run, policy="parity")
    done()
