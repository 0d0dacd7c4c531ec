"""The programs that the ranks of the fault tests run: each trains tiny engines into a store, and is disturbed."""

from __future__ import annotations

from typing import Any

import layerstore
from layerstore.live import leaving
from layerstore.store import Store
from tests.live.forked import tell
from tests.live.tiny import Faults, build, done, hold, told, train

STEPS = 7
RUN = "run"


def undisturbed(options: Any) -> None:
    """Train to the end without any save."""
    train(build(), STEPS)
    done()


def killed(options: Any) -> None:
    """Save at every step; the save of step 4 stops where *options* say, and waits there to be killed."""
    faults = Faults()
    engine = build()
    leaving.PATIENCE_SECONDS = 0.5
    with Store(options["store"], hook=faults) as store:
        saver = layerstore.attach(engine, store, run=RUN, policy=options["policy"])
        train(engine, 3, saver=saver, save_at=(1, 2, 3))
        saver.wait()
        for rank in options["ranks"]:
            faults.on(options["operation"], options["part"], hold(options["part"]), rank=rank)
        train(engine, STEPS, saver=saver, save_at=(4,))
        saver.wait()  # it never comes to an end


def requeued(options: Any) -> None:
    """Go on from wherever the store says, to the end, saving at every step."""
    engine = build()
    with layerstore.open(options["store"]) as store:
        resumed = layerstore.resume(engine, store, run=RUN, must_exist=True)
        assert resumed is not None
        tell("resumed", step=resumed.step, client_state=resumed.client_state)
        with layerstore.attach(engine, store, run=RUN, policy=options["policy"]) as saver:
            train(engine, STEPS, saver=saver, save_at=range(STEPS + 1))
        told(saver)
    done()
