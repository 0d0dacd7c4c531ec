"""A model with every kind of tensor that a module can hold, on every form of mesh, and what trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from layerstore.dcp import StoreReader
from tests.live.dcp.states import State, all_bits, blank

FORMS = {1: ("one", "fsdp", "ddp"), 2: ("fsdp", "ddp"), 3: ("fsdp", "ddp"), 4: ("fsdp", "hsdp", "tensor", "ddp")}
"""How a module is trained on each number of ranks."""

HIDDEN = 18
VOCAB = 50

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


class Block(nn.Module):
    """A residual block whose first norm is frozen, and whose second keeps averages that each forward changes."""

    def __init__(self) -> None:
        """Build the block."""
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.norm.requires_grad_(False)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.averages = nn.BatchNorm1d(HIDDEN, affine=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return *hidden* plus what this block adds."""
        added: torch.Tensor = self.down(self.up(self.norm(hidden)).relu())
        averaged: torch.Tensor = self.averages(added.reshape(-1, HIDDEN))
        return hidden + averaged.reshape(hidden.shape)


class Half(nn.Module):
    """A matrix in bf16."""

    def __init__(self) -> None:
        """Build it."""
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return *hidden* plus what it adds."""
        added: torch.Tensor = self.linear(hidden.bfloat16()).float()
        return hidden + added


class Every(nn.Module):
    """Blocks between an embedding and a head that is the same matrix; one parameter never gets a gradient."""

    def __init__(self) -> None:
        """Build the model."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.short = Half()
        self.small = nn.Linear(HIDDEN, 3)  # fewer rows than ranks
        self.unused = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.register_buffer("not_saved", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.short(hidden)
        loss: torch.Tensor = self.head(hidden).square().mean() * self.get_buffer("scale")[0]
        more: torch.Tensor = self.small(hidden).square().mean()
        return loss + more


def build(form: str, *, seed: int = 0, kind: str = "adamw") -> tuple[nn.Module, Optimizers]:
    """Return a model that is trained in *form*, and its optimizers."""
    torch.manual_seed(seed)
    model = placed(Every(), form)
    return model, optimizers_of(model, kind)


def placed(model: Every, form: str) -> nn.Module:
    """Return *model* on all ranks."""
    if form == "one":
        return model
    if form == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = mesh_of(form)
    of_data = mesh["data"] if form == "tensor" else mesh
    for layer in model.layers:
        if form == "tensor":
            parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=of_data)
    fully_shard(model.short, mesh=of_data)
    fully_shard(model, mesh=of_data)
    return model


def mesh_of(form: str) -> DeviceMesh:
    """Return all ranks as a mesh."""
    count = dist.get_world_size()
    if form == "fsdp":
        return init_device_mesh("cpu", (count,))
    names = ("replicas", "shards") if form == "hsdp" else ("data", "tensor")
    return init_device_mesh("cpu", (2, count // 2), mesh_dim_names=names)


def optimizers_of(model: nn.Module, kind: str) -> Optimizers:
    """Return what trains *model*."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD([each for _, each in trained], lr=1e-2)
    if kind == "momentum":
        return torch.optim.SGD([each for _, each in trained], lr=1e-2, momentum=0.9)
    if kind == "two":
        halves = [[each for name, each in trained if ("layers" in name) == is_layer] for is_layer in (False, True)]
        return [torch.optim.AdamW(halves[0], lr=1e-2), torch.optim.SGD(halves[1], lr=1e-2, momentum=0.9)]
    groups = [
        {"params": [each for _, each in trained if (each.dim() > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def each_of(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return *optimizers* as a list."""
    return optimizers if isinstance(optimizers, list) else [optimizers]


def train(model: nn.Module, optimizers: Optimizers, begin: int, end: int) -> list[str]:
    """Train from step *begin* to *end* on what all ranks see; return the bits of the losses."""
    model.train()
    losses = []
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(100 * step)
        loss = model(torch.randint(0, VOCAB, (4, 8), generator=generator))
        loss.backward()
        for optimizer in each_of(optimizers):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    return losses


def everything(model: nn.Module, optimizers: Optimizers) -> State:
    """Return the state as PyTorch's examples do."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    weights, moments = get_state_dict(bare, optimizers)
    return {"model": weights, "optim": moments}


def other(found: State, expected: State) -> list[str]:
    """Return the keys at which two states differ in any bit."""
    ours, theirs = all_bits(found), all_bits(expected)
    return sorted(key for key in ours | theirs if ours.get(key) != theirs.get(key))


def as_torch_loads(folder: Path, like: State) -> State:
    """Return what torch's own load of *folder* gives."""
    found = blank(like)
    load(found, checkpoint_id=folder)
    return found


def as_reader_loads(store: Any, ref: str, like: State) -> State:
    """Return what a load through our reader gives."""
    found = blank(like)
    load(found, storage_reader=StoreReader(store, ref))
    return found


def rank() -> int:
    """Return this rank, or 0 where there is only one."""
    return dist.get_rank() if dist.is_initialized() else 0
