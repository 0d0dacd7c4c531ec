"""
A model as policies see it: stacks of blocks, with the other layers on the input or output side.

This is derived from names and their order, never from a list of architectures.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from layerstore.layers import block_index

# A word in the last component of a norm's name: norm, final_layer_norm, norm_f, layernorm, norm1, ln_f.
_NORM = re.compile(r"[a-z]*norm\d*|ln\d*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model, each in the model's order."""

    stacks: tuple[tuple[str, ...], ...]
    """Blocks by the module that holds them: one stack in most models, two in an encoder-decoder."""
    input_side: tuple[str, ...]
    """Layers before the blocks that they belong to: embeddings."""
    output_side: tuple[str, ...]
    """Layers after their blocks: norms and heads."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """All blocks, stack after stack."""
        return tuple(block for stack in self.stacks for block in stack)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """All layers that are not blocks."""
        return self.input_side + self.output_side

    def ends(self, first: int, last: int) -> frozenset[str]:
        """Return the *first* and *last* blocks of every stack."""
        return frozenset(
            block for stack in self.stacks for block in (*stack[:first], *stack[max(0, len(stack) - last) :])
        )


@lru_cache(maxsize=64)
def anatomy(layers: tuple[str, ...]) -> Anatomy:
    """
    Return the parts of a model.

    >>> anatomy(("embed", "layers.0", "layers.1", "norm", "head")).output_side
    ('norm', 'head')
    """
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        if block_index(layer) is not None:
            stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    first = {stack: layers.index(blocks[0]) for stack, blocks in stacks.items()}
    sides: dict[bool, list[str]] = {True: [], False: []}
    for position, layer in enumerate(layers):
        if block_index(layer) is None:
            sides[position < _beginning(layer, first, end=len(layers))].append(layer)
    return Anatomy(
        stacks=tuple(map(tuple, stacks.values())), input_side=tuple(sides[True]), output_side=tuple(sides[False])
    )


def _beginning(layer: str, first: Mapping[str, int], *, end: int) -> int:
    """
    Return the start of the blocks that an auxiliary layer belongs to.

    They are those of the stack that shares the longest part of its name (``encoder.final_layer_norm`` and
    ``encoder.block``), by default the first.
    """
    shared = {stack: _shared(layer.split("."), stack.split(".")) for stack in first}
    most = max(shared.values(), default=0)
    return min((first[stack] for stack, count in shared.items() if count == most), default=end)


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def norms(layers: Sequence[str]) -> frozenset[str]:
    """
    Return the norms among *layers*, by name.

    >>> sorted(norms(["model.embed_tokens", "model.norm", "transformer.ln_f", "lm_head"]))
    ['model.norm', 'transformer.ln_f']
    """
    return frozenset(layer for layer in layers if any(map(_NORM.fullmatch, layer.rpartition(".")[2].split("_"))))
