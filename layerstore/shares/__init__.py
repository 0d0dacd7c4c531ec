"""
Work in shares: the processes that a launcher started run one command together.

The first process leads: it runs the command as if it were alone, splits long work into shares, and does the first
share. The others do the shares that the lead sends them, and return small results. Only the lead writes the final
result, a record or a folder's final name. So the result does not depend on the number of processes, and a process that
dies leaves nothing half-done. `processes.py` carries the questions and answers over connections from `meeting.py`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any, TypeVar

Answer = TypeVar("Answer")

Repository = Any
"""A ``storage.Repository``; not imported, because `storage` builds on this module."""

Work = Callable[[Repository, Any], AbstractContextManager[Answer]]
"""
A module-level function, since it is pickled by name. It takes a repository of the lead's store and one part of the
work, and yields the answer.

The resources behind the answer are released once the lead sends the next question, or ends.
"""


class Shares:
    """A single process, which does all work itself."""

    count = 1
    """The number of processes that share the work."""

    @contextmanager
    def scatter_work(
        self, repo: Repository, work: Work[Answer], parts: Sequence[Any]
    ) -> Iterator[Callable[[], list[Answer]]]:
        """
        Have every other process do *work* on one of *parts*, in the store of *repo*, while the lead does its own share.

        The yielded function waits for the answers and returns them in order, or raises the others' first error.
        Once the block has ended, even with an error, all processes that are still alive have finished their work.
        """
        assert not parts, "there is nobody to ask"
        yield list


ALONE = Shares()


def cut(sizes: Sequence[int], *, count: int) -> list[range]:
    """
    Split items with the given *sizes* into *count* ranges of indexes of about equal total size.

    >>> cut([5, 1, 1, 1, 1, 1], count=2)
    [range(0, 1), range(1, 6)]
    """
    ends, total = list(accumulate(sizes)), sum(sizes)
    middles = [end - size / 2 for end, size in zip(ends, sizes, strict=True)]
    starts = [bisect_left(middles, total * number / count) for number in range(count)]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]
