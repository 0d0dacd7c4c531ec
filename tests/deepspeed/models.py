"""The tiny modules that the scenarios train, and their deterministic batches.

Sizes are chosen for what they do to the files (halves, padding, sub-groups), never for what they learn.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

# Here, not where the model is built: an import of transformers inside zero.Init fails, because that context
# wraps the constructors of every module class, those being defined during the import included.
from transformers import LlamaConfig, LlamaForCausalLM

from tests.deepspeed.scenarios import Model

VOCABULARY = 61
"""Tokens of the language models: odd, so that embeddings do not divide by the world size either."""

Batch = dict[str, torch.Tensor]


def mean_squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the error in single precision, whatever the model's own."""
    return ((outputs - targets).float() ** 2).mean()


class OddBlock(nn.Module):
    """A residual block whose sizes divide by nothing."""

    def __init__(self) -> None:
        """Build the block."""
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 11)
        self.down = nn.Linear(11, 7)
        # One element on two ranks: rank 1 holds nothing but padding.
        self.gain = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return *hidden* plus what this block adds."""
        return hidden + self.gain * self.down(torch.relu(self.up(self.norm(hidden))))  # type: ignore[no-any-return] # modules are untyped calls


class Odd(nn.Module):
    """Three residual blocks between an embedding and a head, all of odd sizes."""

    def __init__(self) -> None:
        """Build the module, with one persistent buffer that never changes."""
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(OddBlock() for _ in range(3))
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)
        self.register_buffer("shift", torch.arange(7, dtype=torch.float32) / 8)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error against *targets*."""
        hidden = self.embed(inputs) + self.shift.to(inputs.dtype)
        for layer in self.layers:
            hidden = layer(hidden)
        return mean_squared_error(self.head(self.norm(hidden)), targets)


class EmptyParameter(Odd):
    """The odd module with a parameter that has a shape but no elements."""

    def __init__(self) -> None:
        """Build the module."""
        super().__init__()
        # Never called: DeepSpeed 0.19.8 cannot fetch a parameter without elements for a forward pass.
        self.nothing = nn.Embedding(0, 7)


class NormStatistics(nn.Module):
    """Blocks with BatchNorm, whose running statistics follow each rank's own batches."""

    def __init__(self) -> None:
        """Build the module."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2))
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error against *targets*."""
        hidden = inputs
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return mean_squared_error(self.head(hidden), targets)


def build(model: Model) -> nn.Module:
    """Return a fresh *model*; its weights follow from torch's seed."""
    if model == "odd":
        return Odd()
    if model == "empty_parameter":
        return EmptyParameter()
    if model == "norm_statistics":
        return NormStatistics()
    return llama(tied=model == "tied_llama")


def llama(*, tied: bool, dropout: float = 0.0) -> nn.Module:
    """Return a Llama from Transformers of three blocks, its embeddings *tied* to the head or apart."""
    config = LlamaConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        attention_dropout=dropout,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def batch(model: Model, *, step: int, rank: int, dtype: torch.dtype) -> Batch:
    """Return the batch of *rank* at *step*: the same whenever it is asked for, another for every rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if model in ("llama", "tied_llama"):
        tokens = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
        return {"input_ids": tokens, "labels": tokens}
    inputs = torch.randn(6, 5, generator=generator)
    return {"inputs": inputs.to(dtype), "targets": inputs[:, :3].to(dtype)}


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's *output*: Transformers wraps it, our own modules return it bare."""
    return cast(torch.Tensor, getattr(output, "loss", output))
