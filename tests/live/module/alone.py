"""A module on one device, in the test's own process."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from layerstore.live.saver.snapshot import Copier
from tests.live.dcp.states import State
from tests.live.module.models import Optimizers, build, each_of


def new(kind: str = "adamw", *, seed: int = 0) -> tuple[nn.Module, Optimizers]:
    """Return a model on one device, and its optimizers."""
    return build("one", seed=seed, kind=kind)


def raw(model: nn.Module, optimizers: Optimizers) -> State:
    """Return a copy of what they say themselves; torch's `get_state_dict` would fill an optimizer that has no state."""
    states = [each.state_dict() for each in each_of(optimizers)]
    return copy.deepcopy({"model": model.state_dict(), "optimizers": states})


@contextmanager
def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.001) -> Iterator[None]:
    """Let copies take so long that a forward comes first."""
    begin = Copier.begin

    def later(self: Copier, target: torch.Tensor, source: torch.Tensor) -> Any:
        time.sleep(seconds)
        return begin(self, target, source)

    with monkeypatch.context() as patched:
        patched.setattr(Copier, "begin", later)
        yield
