"""What ranks do that train a module: save by attach, resume what others have saved, be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save

import layerstore
from layerstore.dcp import StoreWriter
from tests.forked import tell
from tests.live.module.models import (
    FORMS,
    as_reader_loads,
    as_torch_loads,
    build,
    everything,
    other,
    train,
)
from tests.live.tiny import done

SAVED_AT = 3
TRAINED_FOR = 5


def everywhere(options: Any) -> None:
    """Save in every form of so many ranks, and tell how training goes on from there."""
    count = dist.get_world_size()
    for form in FORMS[count]:
        run = f"{form}{count}"
        model, optimizers = build(form)
        train(model, optimizers, 0, SAVED_AT)
        state = everything(model, optimizers)
        save(state, checkpoint_id=Path(options["out"], run))
        save(state, storage_writer=StoreWriter(options["store"], run=f"w-{run}", step=SAVED_AT))
        with layerstore.attach(model, optimizers, options["store"], run=run) as saver:
            saver.save(SAVED_AT, client_state={"rank": dist.get_rank()})
            tell("losses", run=run, losses=train(model, optimizers, SAVED_AT, TRAINED_FOR))
    done()


def from_everywhere(options: Any) -> None:
    """Resume in each form what *options* name for it; go on where it was saved in the same one."""
    count = dist.get_world_size()
    for form, runs in options["runs"].items():
        like_model, like_optimizers = build(form, seed=1)
        train(like_model, like_optimizers, 0, 1)
        like = everything(like_model, like_optimizers)
        for run in runs:
            expected = as_torch_loads(Path(options["out"], run), like)
            read = as_reader_loads(options["store"], run, like)
            tell("read", run=run, on=f"{form}{count}", other=other(read, expected))
            for name in (run, f"w-{run}"):
                model, optimizers = build(form, seed=2)
                resumed = layerstore.resume(model, optimizers, options["store"], run=name)
                assert resumed is not None
                tell(
                    "resumed",
                    run=name,
                    on=f"{form}{count}",
                    other=other(everything(model, optimizers), expected),
                    keys=len(expected["model"]),
                    client_state=resumed.client_state,
                )
                if name == f"{form}{count}":
                    tell("losses", run=run, losses=train(model, optimizers, SAVED_AT, TRAINED_FOR))
    done()
