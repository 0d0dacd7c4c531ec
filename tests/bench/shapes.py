"""
What a made-up Llama consists of: its parameters, and how an optimizer and ZeRO-3 group them.

Plain data and arithmetic, by DeepSpeed's own rules.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import isqrt, prod
from typing import Literal

from layerstore.layers import block_index, layer_of
from layerstore.slices import slice_length

Grouping = Literal["two", "layerwise", "layerwise_blocks_first", "llmtailor"]
GROUPINGS: tuple[Grouping, ...] = ("two", "layerwise", "layerwise_blocks_first")

_GIB = 1 << 30

# Bytes of a master with its two moments, and of the gathered half-precision weights beside them.
_SHARDED_BYTES = 12
_GATHERED_BYTES = 2

# Blocks take most of what the size allows, embeddings and head what is left.
_BLOCKS_SHARE = 0.75

# With embeddings, norm and head 26 layers.
_RANKED_BLOCKS = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the model."""

    id: int
    """Its number in the model's order: DeepSpeed's ``ds_id``."""
    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Count its elements."""
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, never to norms."""
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a Llama, and of the job that trains it."""

    layers: int
    hidden: int
    intermediate: int
    vocab: int
    tied: bool = False
    """Whether the head is the embedding."""
    world_size: int = 2

    def parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters, in the model's order; a tied head is none of its own."""
        return tuple(Parameter(id=number, name=name, shape=shape) for number, (name, shape) in enumerate(self._named()))

    def _named(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for block in range(self.layers):
            for name, shape in self._block():
                yield f"model.layers.{block}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def _block(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for part in "qkvo":
            yield f"self_attn.{part}_proj", (self.hidden, self.hidden)
        yield "mlp.gate_proj", (self.intermediate, self.hidden)
        yield "mlp.up_proj", (self.intermediate, self.hidden)
        yield "mlp.down_proj", (self.hidden, self.intermediate)
        yield "input_layernorm", (self.hidden,)
        yield "post_attention_layernorm", (self.hidden,)


def is_frozen(name: str, frozen: Collection[str]) -> bool:
    """
    Whether the parameter *name* is one of *frozen*, or below one of them.

    >>> is_frozen("model.layers.1.self_attn.q_proj.weight", ["model.layers.1"])
    True
    """
    return any(name == item or name.startswith(f"{item}.") for item in frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A param group of the optimizer."""

    decays: bool
    sub_groups: tuple[tuple[Parameter, ...], ...]
    """As ZeRO-3 splits it."""


def group_parameters(
    trained: Collection[Parameter], *, grouping: Grouping, sub_group_size: int, world_size: int
) -> tuple[Group, ...]:
    """Return the optimizer's param groups of the *trained* parameters."""
    layers = list(dict.fromkeys(layer_of(parameter.name) for parameter in trained))

    def place(parameter: Parameter) -> tuple[int, ...]:
        layer = layer_of(parameter.name)
        is_block, index = block_index(layer) is not None, layers.index(layer)
        if grouping == "llmtailor":  # norm, norms of the blocks; head, embedding, matrices of the blocks
            return parameter.decays, is_block, index if is_block else -index
        is_late = grouping == "layerwise_blocks_first" and not is_block
        return is_late, 0 if grouping == "two" else index, not parameter.decays

    placed = (list(members) for _, members in groupby(sorted(trained, key=place), key=place))
    return tuple(
        Group(decays=members[0].decays, sub_groups=tuple(split(tuple(members), sub_group_size, world_size)))
        for members in placed
    )


def split(members: tuple[Parameter, ...], sub_group_size: int, world_size: int) -> Iterator[tuple[Parameter, ...]]:
    """
    Yield the sub-groups of a param group, by DeepSpeed's rule.

    A sub-group is closed once its elements per rank reach *sub_group_size*; no parameter is cut for it.
    """
    started: list[Parameter] = []
    size = 0
    for parameter in members:
        started.append(parameter)
        size += slice_length(parameter.elements, world_size)
        if size >= sub_group_size:
            yield tuple(started)
            started, size = [], 0
    if started:
        yield tuple(started)


def shape_of_size(gib: float, *, is_gathered: bool, is_odd: bool = False, world_size: int | None = None) -> ModelShape:
    """
    Return a model whose checkpoint has about *gib* GiB, gathered weights included if *is_gathered*.

    Every slice of a matrix fills whole pages (those of norms too, from 1 GiB on): two ranks, powers of two.
    If *is_odd*, no slice does: three ranks, and sizes that divide by nothing.
    With *world_size* it has 26 layers whatever its size, so 52 objects for each of so many ranks.
    """
    budget = int(gib * _GIB / (_SHARDED_BYTES + (_GATHERED_BYTES if is_gathered else 0)))
    if world_size is not None:
        hidden = isqrt(int(_BLOCKS_SHARE * budget) // _RANKED_BLOCKS * 4 // 49) // 64 * 64
        vocab = (budget - _RANKED_BLOCKS * _block_elements(hidden)) // (2 * hidden) // 32 * 32
        return ModelShape(
            layers=_RANKED_BLOCKS,
            hidden=hidden,
            intermediate=_intermediate(hidden),
            vocab=vocab,
            world_size=world_size,
        )
    hidden = next(
        (size for size in (2048, 1024, 512, 256, 128) if 2 * _block_elements(size) <= _BLOCKS_SHARE * budget), 64
    )
    layers = max(1, int(_BLOCKS_SHARE * budget) // _block_elements(hidden))
    vocab = max(64, (budget - layers * _block_elements(hidden)) // (2 * hidden) // 32 * 32)
    if is_odd:
        return ModelShape(
            layers=layers,
            hidden=hidden - 3,
            intermediate=_intermediate(hidden) - 3,
            vocab=vocab // 96 * 96 + 1,
            world_size=3,
        )
    return ModelShape(layers=layers, hidden=hidden, intermediate=_intermediate(hidden), vocab=vocab)


def _intermediate(hidden: int) -> int:
    return hidden * 11 // 4


def _block_elements(hidden: int) -> int:
    return 4 * hidden * hidden + 3 * hidden * _intermediate(hidden) + 2 * hidden
