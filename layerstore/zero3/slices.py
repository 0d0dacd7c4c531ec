"""
How ZeRO-3 cuts a parameter: interval arithmetic, nothing else.

Rank r of W holds ``flatten(parameter)[r*k : (r+1)*k]`` with k = ceil(n / W); what lies beyond n is padding.
"""

from collections.abc import Sequence
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
