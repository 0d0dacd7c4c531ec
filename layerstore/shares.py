"""
Work in shares: the processes that a launcher has started do one command together.

The first process leads: it runs the command as if it were alone, cuts the long work into shares, and does the first.
The others do what it asks, and answer with small results. What is written at the end, a record or a folder's last
name, the lead alone writes. So nothing depends on how many there are, and a process that dies leaves nothing half.

`live.shares` carries the questions and answers between processes.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, TypeVar

Answer = TypeVar("Answer")

Work = Callable[[Any, Any], AbstractContextManager[Answer]]
"""
A function of a module. It gets the repository that the lead works in and one part of the work, and yields the answer.

What it still holds then is released once the lead asks for something else, or ends.
"""


class Shares:
    """One process, which does all work itself."""

    count = 1
    """How many processes share the work."""

    @contextmanager
    def asked(self, repo: Any, work: Work[Answer], parts: Sequence[Any]) -> Iterator[Callable[[], list[Answer]]]:
        """
        Let every other process do *work* on its one of *parts*, in the store of *repo*, while the lead does its share.

        What is yielded waits for the answers, and returns them in their order, or raises an error of the others.
        Whichever way the block is left, those that live have ended their work by then.
        """
        assert not parts, "there is nobody to ask"
        yield list


ALONE = Shares()


def cut(sizes: Sequence[int], *, count: int) -> list[range]:
    """
    Cut items of *sizes* into *count* stretches of about the same size, by their numbers.

    >>> cut([5, 1, 1, 1, 1, 1], count=2)
    [range(0, 1), range(1, 6)]
    """
    ends, total = list(accumulate(sizes)), sum(sizes)
    middles = [end - size / 2 for end, size in zip(ends, sizes, strict=True)]
    starts = [bisect_left(middles, total * number / count) for number in range(count)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
