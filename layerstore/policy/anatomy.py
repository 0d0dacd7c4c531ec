"""
What a policy sees of a model: its stacks of blocks, and on which side of them the other layers lie.

It follows from names and their order, never from a list of architectures.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from layerstore.layers import block_index

# The last component of a normalisation's name: norm, final_layer_norm, norm_f, ln_f, ln_post.
_NORM = re.compile(r"(?:.*_)?(?:\w*norm\w*|ln)(?:_.*|\d*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model, each in the model's order."""

    stacks: tuple[tuple[str, ...], ...]
    """Blocks by the module that holds them: one stack in most models, two in an encoder-decoder."""
    input_side: tuple[str, ...]
    """Before the first block: embeddings."""
    output_side: tuple[str, ...]
    """After it: norms and heads."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """All blocks, stack after stack."""
        return tuple(block for stack in self.stacks for block in stack)

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """All layers that are no blocks."""
        return self.input_side + self.output_side

    def ends(self, first: int, last: int) -> frozenset[str]:
        """Return the *first* and *last* blocks of every stack."""
        return frozenset(
            block for stack in self.stacks for block in (*stack[:first], *stack[max(0, len(stack) - last) :])
        )


@lru_cache(maxsize=64)
def anatomy(layers: tuple[str, ...]) -> Anatomy:
    """
    Take a model apart.

    >>> anatomy(("embed", "layers.0", "layers.1", "norm", "head")).output_side
    ('norm', 'head')
    """
    stacks: dict[str, list[str]] = {}
    for layer in layers:
        if block_index(layer) is not None:
            stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    first = next((position for position, layer in enumerate(layers) if block_index(layer) is not None), len(layers))
    return Anatomy(
        stacks=tuple(map(tuple, stacks.values())),
        input_side=layers[:first],
        output_side=tuple(layer for layer in layers[first:] if block_index(layer) is None),
    )


def norms(layers: Sequence[str]) -> frozenset[str]:
    """
    Return the normalisations among *layers*, by name.

    >>> sorted(norms(["model.embed_tokens", "model.norm", "transformer.ln_f", "lm_head"]))
    ['model.norm', 'transformer.ln_f']
    """
    return frozenset(layer for layer in layers if _NORM.fullmatch(layer.rpartition(".")[2]))
