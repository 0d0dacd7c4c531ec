"""
Which elements of which parameters each rank has in its flat buffers.

Stage 3 splits every parameter evenly among the ranks. Stages 1 and 2 concatenate the parameters of a param group and
split the whole group: a rank's partition may begin and end inside a parameter.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TypeAlias

from layerstore.errors import LayoutMismatch
from layerstore.slices import slice_length
from layerstore.states import RankState
from layerstore.zero3.trees.view import STAGE_3, TreeView, config_of, outer_optimizer, stage_of, sub_group_shapes

Groups = Sequence[Mapping[str, Sequence[int]]]
"""For each flat buffer: its parameters with their shapes, in the order of the buffer."""

_ALIGNMENT = 2
"""DeepSpeed makes partitions a multiple of this many elements, so that 16-bit ones begin at multiples of four bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One or more elements of a parameter that are contiguous in a rank's flat buffer."""

    name: str
    begin: int
    """The index of the first element within the parameter."""
    elements: int
    start: int
    """The index of the first element within the buffer."""


@dataclass(frozen=True)
# Without slots, here and below: a cached property needs a __dict__.
class EvenSharding:
    """Stage 3: every rank has an equal slice of each parameter, padded at the end of the parameter."""

    groups: Groups
    world_size: int
    cut: str = "even"
    """The value of ``cut`` in versions that are split this way."""

    def fragments(self, group: int, rank: int) -> Iterator[Fragment]:
        """Yield the fragments in *rank*'s part of the flat buffer *group*, in order."""
        start = 0
        for name, elements, length in self._members[group]:
            valid = min(length, elements - rank * length)
            if valid > 0:
                yield Fragment(name=name, begin=rank * length, elements=valid, start=start)
            start += length

    def elements(self, group: int, rank: int) -> int:
        """Return the length of the flat buffers of *group*, padding included."""
        return self._elements[group]

    @cached_property
    def _members(self) -> list[list[tuple[str, int, int]]]:
        """By group: each parameter's name, its length and the length of its slices."""
        lengths = ([(name, prod(shape)) for name, shape in group.items()] for group in self.groups)
        return [[(name, count, slice_length(count, self.world_size)) for name, count in group] for group in lengths]

    @cached_property
    def _elements(self) -> list[int]:
        return [sum([length for _, _, length in members]) for members in self._members]

    def lean(self, group: int, rank: int) -> int:
        """Return the same length as `elements`, because padding belongs to each parameter's slice."""
        return self.elements(group, rank)


@dataclass(frozen=True)
class PartitionSharding:
    """Stages 1 and 2: every rank has an equal partition of each param group, which is padded at its end."""

    groups: Groups
    world_size: int
    paddings: Sequence[Sequence[int]]
    """By group: how many padding elements follow each parameter to align the next; empty if there is no padding."""
    cut: str = "partition"

    def fragments(self, group: int, rank: int) -> Iterator[Fragment]:
        """Yield the fragments in *rank*'s part of the flat buffer *group*, in order."""
        size, starts, members = self.elements(group, rank), self._starts[group], self._members[group]
        first, last = rank * size, (rank + 1) * size
        number = max(bisect_right(starts, first) - 1, 0)
        while number < len(members) and starts[number] < last:
            (name, elements), at = members[number], starts[number]
            begin, end = max(first, at), min(last, at + elements)
            if begin < end:
                yield Fragment(name=name, begin=begin - at, elements=end - begin, start=begin - first)
            number += 1

    def elements(self, group: int, rank: int) -> int:
        """Return the length of the flat buffers of *group*, padding included."""
        return _ALIGNMENT * -(-self._starts[group][-1] // (_ALIGNMENT * self.world_size))

    def lean(self, group: int, rank: int) -> int:
        """Return the length without the padding at the end, because a master may be saved without that padding."""
        size = self.elements(group, rank)
        return max(0, min(size, self._starts[group][-1] - rank * size))

    @cached_property
    def _members(self) -> list[list[tuple[str, int]]]:
        """The name and length of each parameter, by group."""
        return [[(name, prod(shape)) for name, shape in group.items()] for group in self.groups]

    @cached_property
    def _starts(self) -> list[list[int]]:
        """By group: the positions in the group where each parameter starts and, last, where the group ends."""
        starts = []
        for number, members in enumerate(self._members):
            paddings = self.paddings[number] if self.paddings else [0] * len(members)
            padded_lengths = (elements + padding for (_, elements), padding in zip(members, paddings, strict=True))
            starts.append(list(accumulate(padded_lengths, initial=0)))
        return starts


Sharding: TypeAlias = EvenSharding | PartitionSharding
"""How a ZeRO stage splits the trained parameters."""


def sharding_in(state: RankState) -> Sharding:
    """Return how the save of *state* was split."""
    return sharding_of(TreeView.of(state.model), outer_optimizer(state))


def sharding_of(model: TreeView, outer: TreeView) -> Sharding:
    """Return how a save was split, from its ``model_states`` and the state of DeepSpeed's optimizer wrapper."""
    groups, world_size = sub_group_shapes(model), model["dp_world_size"].integer()
    if stage_of(outer) == STAGE_3:
        return EvenSharding(groups, world_size)
    return PartitionSharding(groups, world_size, _paddings(outer, groups))


def _paddings(outer: TreeView, groups: Groups) -> list[list[int]]:
    kept = outer.get("param_alignment_paddings")
    if kept is None:
        return []
    paddings = [[count.integer() for _, count in group.children()] for _, group in kept.children()]
    lengths = [len(group) for group in groups]
    if [len(group) for group in paddings] != lengths or any(count < 0 for group in paddings for count in group):
        raise LayoutMismatch(
            f"{outer.path}: param_alignment_paddings does not fit the parameters of param_shapes",
            hint="the file is damaged: ingest another checkpoint",
        )
    return paddings


# -- the order of parameters -----------------------------------------------------------------------------------------


def is_dealt(model: TreeView, outer: TreeView) -> bool:
    """
    Whether the parameters of each group were reordered by ``round_robin_gradients``.

    One of DeepSpeed's optimizers does not state its ZeRO stage; that optimizer ignores the setting.
    """
    zero = (config_of(model) or {}).get("zero_optimization")
    is_set = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    return is_set and outer.get("zero_stage") is not None


def dealt(names: Sequence[str], world_size: int) -> list[str]:
    """
    Return *names* as ``round_robin_gradients`` orders them: dealt out to the ranks, then rank after rank.

    >>> dealt("abcde", 2), gathered_again(dealt("abcde", 2), 2)
    (['a', 'c', 'e', 'b', 'd'], ['a', 'b', 'c', 'd', 'e'])
    """
    return [names[at] for at in _deal(len(names), world_size)]


def gathered_again(names: Sequence[str], world_size: int) -> list[str]:
    """Undo `dealt`: return *names* in their original order."""
    return [name for _, name in sorted(zip(_deal(len(names), world_size), names, strict=True))]


def _deal(count: int, world_size: int) -> list[int]:
    return [at for rank in range(min(world_size, count)) for at in range(rank, count, world_size)]
