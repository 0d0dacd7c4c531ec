"""What ranks on a mesh do beside saving and loading: train on while a save is under way, be killed in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from layerstore.dcp import StoreReader, StoreWriter
from layerstore.store import Store
from tests.forked import tell
from tests.live.dcp.states import all_bits, blank
from tests.live.module.models import build, everything, train
from tests.live.tiny import Faults, attempt, done, hold

SAVES = 3


def going_on(options: Any) -> None:
    """Save three times while training goes on, and the same states with a policy; tell whether they are torch's."""
    model, optimizer = build("fsdp")
    group = dist.new_group(backend="gloo")  # training uses the other one meanwhile
    for step in range(1, SAVES + 1):
        train(model, optimizer, step - 1, step)
        state, folder = {**everything(model, optimizer), "step": step}, Path(options["out"], str(step))
        save(state, checkpoint_id=folder)
        save(state, storage_writer=StoreWriter(options["store"], run="half", step=step, policy="parity"))
        writer = StoreWriter(options["store"], run="async", step=step)
        future = async_save(state, storage_writer=writer, async_stager=writer, process_group=group)
        train(model, optimizer, 100, 102)
        future.result()  # type: ignore[union-attr] # of a future
        ours, theirs = blank(state), blank(state)
        load(ours, storage_reader=StoreReader(options["store"], f"async@{step}"))
        load(theirs, checkpoint_id=folder)
        tell("same", same=all_bits(ours) == all_bits(theirs), moved=all_bits(ours) != all_bits(state))
    done()


def held(options: Any) -> None:
    """Save once; then, in the next save, the last rank stays where the test kills it."""
    model, optimizer = build("fsdp")
    train(model, optimizer, 0, 1)
    faults = Faults()
    with Store(options["store"], hook=faults) as store:
        save(everything(model, optimizer), storage_writer=StoreWriter(store, run="sft", step=1))
        faults.on(options["operation"], options["part"], hold("writing"), rank=dist.get_world_size() - 1)
        train(model, optimizer, 1, 2)
        state = everything(model, optimizer)
        attempt(lambda: save(state, storage_writer=StoreWriter(store, run="sft", step=2)), "killed")


def on(options: Any) -> None:
    """Go on from the save before, and save what the killed one did not; tell whether nothing was lost by the kill."""
    model, optimizer = build("fsdp", seed=1)
    train(model, optimizer, 0, 1)  # or torch would give moments to what has never had a gradient
    state = everything(model, optimizer)
    load(state, storage_reader=StoreReader(options["store"], "sft"))
    lenient = StateDictOptions(strict=False)  # it has no moments either
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=lenient)
    train(model, optimizer, 1, 2)
    state = everything(model, optimizer)
    save(state, storage_writer=StoreWriter(options["store"], run="sft", step=2))
    found = blank(state)
    load(found, storage_reader=StoreReader(options["store"], "sft@2"))
    whole_model, whole_optimizer = build("fsdp")
    train(whole_model, whole_optimizer, 0, 2)
    uninterrupted = all_bits(everything(whole_model, whole_optimizer))
    tell("same", same=all_bits(found) == all_bits(state) == uninterrupted)
    done()
