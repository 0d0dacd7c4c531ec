"""
How ZeRO-3 cuts a parameter, and a param group into sub-groups: interval arithmetic, nothing else.

Rank r of W holds ``flatten(parameter)[r*k : (r+1)*k]`` with k = ceil(n / W); what lies beyond n is padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


def elements_of(shape: Sequence[int]) -> int:
    """Count the elements of a tensor of *shape*."""
    return prod(shape)


def slice_length(elements: int, world_size: int) -> int:
    """
    Return k, the length of every rank's slice, padding included.

    >>> slice_length(9, 8), slice_length(0, 8)
    (2, 0)
    """
    return -(-elements // world_size)


def valid_elements(elements: int, world_size: int, rank: int) -> int:
    """
    Return how many elements of *rank*'s slice are not padding.

    >>> [valid_elements(9, 8, rank) for rank in range(8)]
    [2, 2, 2, 2, 1, 0, 0, 0]
    """
    length = slice_length(elements, world_size)
    return max(0, min(length, elements - rank * length))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring elements of one slice."""

    shard: int
    """Which slice."""
    start: int
    """The first one, counted from the slice's own beginning."""
    elements: int


def stretches(elements: int, shards: int, *, begin: int, end: int) -> Iterator[Stretch]:
    """
    Yield where the elements *begin* to *end* of a parameter lie that was cut into *shards* slices, in order.

    What one rank of three needs of nine elements that two ranks have saved:

    >>> [(part.shard, part.start, part.elements) for part in stretches(9, 2, begin=3, end=6)]
    [(0, 3, 2), (1, 0, 1)]
    """
    assert end <= elements, "padding lies in no slice"
    length = slice_length(elements, shards)
    while begin < end:
        shard, start = divmod(begin, length)
        stop = min(end, (shard + 1) * length)
        yield Stretch(shard, start, stop - begin)
        begin = stop


def sub_groups(lengths: Sequence[int], *, size: float) -> Iterator[range]:
    """
    Yield which parameters of a param group DeepSpeed puts into one flat buffer, by their slices' *lengths*.

    A sub-group is closed once what it holds per rank reaches *size*; no parameter is cut for it.

    >>> list(sub_groups([8, 6, 4], size=10)), list(sub_groups([5, 4, 3], size=10))
    ([range(0, 2), range(2, 3)], [range(0, 3)])
    """
    is_split = sum(lengths) > size
    first = held = 0
    for index, length in enumerate(lengths):
        held += length
        if is_split and held >= size:
            yield range(first, index + 1)
            first, held = index + 1, 0
    if first < len(lengths):
        yield range(first, len(lengths))
