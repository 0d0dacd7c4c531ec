"""
Which layers LLMTailor's group ids mean in a model: by names and order, never by a list of architectures.

LLMTailor numbers 0 the norm, 1 to L the blocks, then the head and the embedding; tied models have no head.
Those were positions in an optimizer that it had grouped itself. Here they are names for layers,
so the order in which the user's optimizer lists its groups means nothing.
"""

import re
from dataclasses import dataclass

from layerstore.errors import InvalidInput
from layerstore.layers import block_index
from layerstore.policy.recipe.names import listed, stack_of
from layerstore.policy.recipe.plan import ModelOutline, OutlineLayer

NORM_GROUP = 0

_NORM = re.compile(r"norm|(^|[._])ln([._]|$)", re.IGNORECASE)
_HEAD = "lm_head"
_EMBEDDING = re.compile(r"embed|wte|tok", re.IGNORECASE)
_OTHER_EMBEDDING = re.compile(r"pos|wpe|type|segment", re.IGNORECASE)
_HINT = "write base: and layers: instead, which call layers by their names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The layers of a model, by the part they play."""

    blocks: tuple[str, ...]
    """By index."""
    norm: str
    """The last norm, outside the blocks."""
    head: str | None
    """The output layer; None when it is the embedding, tied."""
    embedding: str
    extras: tuple[str, ...]
    """Auxiliary layers that no group id means: position embeddings, a value head, buffers."""

    @property
    def groups(self) -> dict[int, str]:
        """The auxiliary layers by LLMTailor's group ids."""
        last = len(self.blocks)
        if self.head is None:
            return {NORM_GROUP: self.norm, last + 1: self.embedding}
        return {NORM_GROUP: self.norm, last + 1: self.head, last + 2: self.embedding}

    def described(self) -> str:
        """Say which auxiliary layer has which group id."""
        return ", ".join(f"[{group}, {group}] {layer}" for group, layer in self.groups.items())


def anatomy_of(model: ModelOutline) -> Anatomy:
    """
    Return the parts of *model*.

    Raises:
        InvalidInput: It has several stacks of blocks, or auxiliary layers whose part cannot be told.
    """
    blocks = _blocks(model)
    order = {name: position for position, name in enumerate(model.names)}
    first, last = min(order[block] for block in blocks), max(order[block] for block in blocks)
    auxiliary = [layer for layer in model.layers if layer.parameters and layer.name not in blocks]
    before = [layer for layer in auxiliary if order[layer.name] < first]
    after = [layer for layer in auxiliary if order[layer.name] > last]

    tied = [layer for layer in before + after if layer.ties]
    embedding = _one(tied, what="embedding") if tied else _embedding(before)
    norm = _norm([layer for layer in before if layer is not embedding], [one for one in after if one is not embedding])
    head = _head([layer for layer in after if layer not in (embedding, norm)], is_tied=bool(tied))
    parts = {*blocks, embedding.name, norm.name, *([head.name] if head else [])}
    return Anatomy(
        blocks=blocks,
        norm=norm.name,
        head=head.name if head else None,
        embedding=embedding.name,
        extras=tuple(name for name in model.names if name not in parts),
    )


def _blocks(model: ModelOutline) -> tuple[str, ...]:
    stacks: dict[str, dict[int, str]] = {}
    for name in model.names:
        index = block_index(name)
        if index is not None:
            stacks.setdefault(stack_of(name), {})[index] = name
    if len(stacks) != 1:
        names = listed(name for stack in stacks.values() for name in stack.values())
        found = f"{len(stacks)} stacks of blocks: {names}" if stacks else "no blocks"
        raise InvalidInput(
            f"LLMTailor's layer_range counts one stack of blocks, and this model has {found}", hint=_HINT
        )
    (blocks,) = stacks.values()
    return tuple(blocks[index] for index in sorted(blocks))


def _embedding(before: list[OutlineLayer]) -> OutlineLayer:
    """Find the embedding of an untied model among what may stand *before* the blocks: positions, norms, projectors."""
    others = [layer for layer in before if not _NORM.search(layer.name)]
    named = [layer for layer in others if _EMBEDDING.search(layer.name) and not _OTHER_EMBEDDING.search(layer.name)]
    return _one(others if len(others) == 1 else named or others, what="embedding")


def _norm(before: list[OutlineLayer], after: list[OutlineLayer]) -> OutlineLayer:
    """Find the last norm: after the blocks in most models, before them where the code names it first."""
    named = [layer for layer in after if _NORM.search(layer.name)] or [
        layer for layer in before if _NORM.search(layer.name)
    ]
    return _one(named or [layer for layer in after if not _is_head(layer)], what="norm")


def _head(candidates: list[OutlineLayer], *, is_tied: bool) -> OutlineLayer | None:
    named = [layer for layer in candidates if _is_head(layer)]
    if is_tied and not named:
        return None  # what remains is an extra: a value head
    return _one(named or candidates, what="head")


def _is_head(layer: OutlineLayer) -> bool:
    return layer.name.rpartition(".")[2] == _HEAD


def _one(candidates: list[OutlineLayer], *, what: str) -> OutlineLayer:
    if len(candidates) != 1:
        found = f"{listed(layer.name for layer in candidates)} may each be it" if candidates else "there is none"
        raise InvalidInput(f"LLMTailor's grammar takes one {what}, and in this model {found}", hint=_HINT)
    return candidates[0]
