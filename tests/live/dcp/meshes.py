"""
What ranks on meshes of every form do: save into a store and as torch does, load what others have saved, be killed.

Each form of mesh on each number of ranks is a run of its own, and torch's own folder of the same state lies beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from layerstore.dcp import StoreReader, StoreWriter
from layerstore.store import Store
from tests.forked import tell
from tests.live.dcp.states import all_bits, blank
from tests.live.module.models import MESHES, mesh_of, state_of
from tests.live.tiny import Faults, attempt, done, hold

HIDDEN = 18
"""No number of ranks but 1, 2 and 3 divides it."""
VOCAB = 50

SAVED_AT = 3
TRAINED_FOR = 6


class Block(nn.Module):
    """A residual block; its norm is not trained."""

    def __init__(self) -> None:
        """Build the block."""
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return *hidden* plus what this block adds."""
        added: torch.Tensor = self.down(self.up(self.norm(hidden)).relu())
        return hidden + added


class Model(nn.Module):
    """Blocks between an embedding and a head that is smaller than four ranks."""

    def __init__(self) -> None:
        """Build the model."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, 3)
        self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        loss: torch.Tensor = (self.head(hidden) * self.get_buffer("scale")[0]).square().mean()
        return loss


def build(form: str, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on a mesh of all ranks, and its optimizer."""
    torch.manual_seed(seed)
    model, mesh = Model(), mesh_of(form)
    for layer in model.layers:
        if form == "tensor":
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"] if form == "tensor" else mesh)
    fully_shard(model, mesh=mesh["data"] if form == "tensor" else mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int, *, form: str = "fsdp") -> list[str]:
    """Train from step *begin* to *end*; return the bits of the losses."""
    losses = []
    share = dist.get_rank() // 2 if form == "tensor" else dist.get_rank()  # ranks that share a tensor see the same
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(100 * step + share)
        loss = model(torch.randint(0, VOCAB, (4, 8), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    return losses


def everywhere(options: Any) -> None:
    """Save on every form of mesh of so many ranks, and tell how training goes on from there."""
    count = dist.get_world_size()
    for form in MESHES[count]:
        model, optimizer = build(form)
        train(model, optimizer, 0, SAVED_AT, form=form)
        state, run = state_of(model, optimizer, step=SAVED_AT), f"{form}{count}"
        save(state, storage_writer=StoreWriter(options["store"], run=run, step=SAVED_AT))
        save(state, checkpoint_id=Path(options["out"], run))
        tell("losses", run=run, losses=train(model, optimizer, SAVED_AT, TRAINED_FOR, form=form))
    done()


def from_everywhere(options: Any) -> None:
    """Load on every form of mesh of so many ranks what was saved on all of them; go on where it is the same one."""
    count = dist.get_world_size()
    for form in MESHES[count]:
        for run in (f"{saved}{ranks}" for ranks, forms in MESHES.items() for saved in forms):
            model, optimizer = build(form, seed=1)
            train(model, optimizer, 0, 1, form=form)
            ours, theirs = (blank(state_of(model, optimizer, step=0)) for _ in range(2))
            load(ours, storage_reader=StoreReader(options["store"], f"{run}@{SAVED_AT}"))
            load(theirs, checkpoint_id=Path(options["out"], run))
            found, expected = all_bits(ours), all_bits(theirs)
            tell(
                "compared",
                run=run,
                on=f"{form}{count}",
                keys=len(expected),
                other=sorted(key for key in expected | found if found.get(key) != expected.get(key)),
            )
            if run == f"{form}{count}":
                set_state_dict(model, optimizer, model_state_dict=ours["model"], optim_state_dict=ours["optim"])
                tell("losses", run=run, losses=train(model, optimizer, SAVED_AT, TRAINED_FOR, form=form))
    done()


def going_on(options: Any) -> None:
    """Save three times while training goes on, and the same states with a policy; tell whether they are torch's."""
    model, optimizer = build("fsdp")
    group = dist.new_group(backend="gloo")  # training uses the other one meanwhile
    for step in range(1, SAVED_AT + 1):
        train(model, optimizer, step - 1, step)
        state, folder = state_of(model, optimizer, step=step), Path(options["out"], str(step))
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
        save(state_of(model, optimizer), storage_writer=StoreWriter(store, run="sft", step=1))
        faults.on(options["operation"], options["part"], hold("writing"), rank=dist.get_world_size() - 1)
        train(model, optimizer, 1, 2)
        state = state_of(model, optimizer)
        attempt(lambda: save(state, storage_writer=StoreWriter(store, run="sft", step=2)), "killed")


def on(options: Any) -> None:
    """Go on from the save before, and save what the killed one did not; tell whether it is what torch saves."""
    model, optimizer = build("fsdp", seed=1)
    state = state_of(model, optimizer)
    load(state, storage_reader=StoreReader(options["store"], "sft"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train(model, optimizer, 1, 2)
    state = state_of(model, optimizer)
    save(state, storage_writer=StoreWriter(options["store"], run="sft", step=2))
    found = blank(state)
    load(found, storage_reader=StoreReader(options["store"], "sft@2"))
    tell("same", same=all_bits(found) == all_bits(state))
    done()
