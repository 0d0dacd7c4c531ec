"""The elements of a box of a tensor, as contiguous stretches in the tensor's own order."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod


def box_runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """
    Yield the first element and the length of each contiguous stretch of a tensor's box, in order.

    Two rows of a matrix are contiguous; half of its columns are not:

    >>> list(box_runs((4, 3), (2, 0), (2, 3))), list(box_runs((4, 3), (0, 1), (2, 2)))
    ([(6, 6)], [(1, 2), (4, 2)])
    """
    if not prod(sizes):
        return
    # The last dimensions in which the box is as wide as the tensor are contiguous.
    split = len(shape)
    while split and sizes[split - 1] == shape[split - 1]:
        split -= 1
    strides = [prod(shape[number + 1 :]) for number in range(len(shape))]
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    length = prod(sizes[max(split - 1, 0) :])
    for outer in product(*map(range, sizes[: max(split - 1, 0)])):
        yield begin + sum(index * stride for index, stride in zip(outer, strides, strict=False)), length
