"""A small model with every kind of parameter, its states as trainers nest them, and comparisons to the last bit."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from layerstore import Store
from layerstore.dcp import StoreReader, StoreWriter
from layerstore.model import Commit

State = dict[str, Any]

HIDDEN = 8
VOCAB = 12
LAYERS = 4


class Block(nn.Module):
    """Two matrices, of which one is bf16, and a norm that is not trained."""

    def __init__(self) -> None:
        """Build the block."""
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(HIDDEN)
        self.norm.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return *hidden* plus what this block adds."""
        added: torch.Tensor = self.down(self.up(self.norm(hidden)).relu().bfloat16())
        return hidden + added.float()


class Small(nn.Module):
    """Blocks between an embedding and a head that is the same parameter; one parameter has no elements."""

    def __init__(self) -> None:
        """Build the model."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        loss: torch.Tensor = self.head(hidden).square().mean() + self.nothing.sum()
        return loss


class Training:
    """A model in training."""

    def __init__(self, *, seed: int = 0) -> None:
        """Build it, the same one for each *seed*."""
        torch.manual_seed(seed)
        self.model = Small()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def train(self, updates: int = 1) -> Training:
        """Make *updates*."""
        for _ in range(updates):
            self.model(torch.randint(0, VOCAB, (2, 5))).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self, *, flat: bool = False, **more: Any) -> State:
        """Return it as PyTorch's examples nest it, and *more*."""
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optim": optimizer, **more}

    def raw(self) -> State:
        """Return what model and optimizer say themselves, whose keys are numbers."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


def extras() -> State:
    """Return what trainers keep beside model and optimizer."""
    return {
        "rng": torch.get_rng_state(),
        "rate": torch.tensor(0.125, dtype=torch.float64),
        "trainer": {"name": "sft", "epoch": 3, "done": False, "history": [1.5, None, ("a", 2)], "empty": {}},
        "python_rng": random.Random(5).getstate(),
    }


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Return everything in a nested state, by the way to it."""
    if isinstance(state, dict | list | tuple) and state:
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {name: leaf for key, value in pairs for name, leaf in leaves(value, f"{path}/{key}").items()}
    return {path: state.full_tensor() if isinstance(state, DTensor) else state}


def bits(leaf: Any) -> Any:
    """Return what compares as equal only to what is equal to the last bit."""
    if isinstance(leaf, torch.Tensor):
        data = leaf.detach().cpu().contiguous().view(-1)
        return str(leaf.dtype), tuple(leaf.shape), bytes(data.view(torch.uint8).numpy()) if leaf.numel() else b""
    return type(leaf).__name__, repr(leaf)


def all_bits(state: State) -> dict[str, Any]:
    """Return the bits of everything in *state*."""
    return {name: bits(leaf) for name, leaf in leaves(state).items()}


def blank(state: State) -> State:
    """Return *state* with other tensors, numbers and words: what a load has to fill."""

    def blanked(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.full_like(value, 1)
        if isinstance(value, dict):
            return {key: blanked(item) for key, item in value.items()}
        if isinstance(value, list):
            return [blanked(item) for item in value]
        return "blank" if isinstance(value, str) else value

    found: State = blanked(copy.deepcopy(state))
    return found


def cause(error: BaseException) -> BaseException:
    """Return what made DCP raise *error*."""
    failures = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else []
    return failures[0] if failures else error


def kept(store: Store, state: State, *, run: str = "sft", step: int = 1, **options: Any) -> Commit:
    """Save *state* into *store*."""
    writer = StoreWriter(store, run=run, step=step, **options)
    save(state, storage_writer=writer)
    assert writer.commit is not None
    return writer.commit


def read(store: Store | Path | str, ref: str, like: State, **options: Any) -> State:
    """Return what a load of *ref* makes of a state that is *like* this one."""
    found = blank(like)
    load(found, storage_reader=StoreReader(store, ref, **options))
    return found
