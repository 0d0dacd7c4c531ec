"""
One run as its records stand: what is visible, which attempts there are, and the history of each.

Everything is derived from the rows when it is first asked for, and kept: a view never changes.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from layerstore.errors import LayerstoreError
from layerstore.model import CommitId, Fork
from layerstore.storage.commits import RecordName
from layerstore.storage.manifest import RecordRow

_BY_ATTEMPT = attrgetter("attempt")
_BY_STEP = attrgetter("step")
_IN_ORDER = attrgetter("attempt", "step", "id")
_IN_HISTORY = attrgetter("step", "attempt", "id")


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The records of one run, as they stand now."""

    run: str
    rows: dict[CommitId, RecordRow]
    """Every readable record."""
    damaged: dict[RecordName, LayerstoreError]
    """Records that are there and cannot be read, or that are remembered and not there."""

    @cached_property
    def hidden(self) -> set[CommitId]:
        """Commits that another one supersedes."""
        return {hidden for row in self.rows.values() for hidden in row.supersedes}

    @cached_property
    def visible(self) -> list[RecordRow]:
        """What a user sees, by attempt and step."""
        hidden = self.hidden
        return [row for row in self._ordered if row.layer_names and row.id not in hidden]

    @cached_property
    def attempts(self) -> list[int]:
        """The attempts that have visible commits, oldest first."""
        return list(self._by_attempt)

    def of_attempt(self, attempt: int) -> list[RecordRow]:
        """Return the visible commits of *attempt* itself, by step."""
        return self._by_attempt.get(attempt, [])

    def fork_of(self, attempt: int) -> Fork | None:
        """
        Return where *attempt* left an earlier one.

        From hidden records too: an attempt of which nothing is left still stands between two others.
        Attempts are numbered in order: a record that claims to have left a later one is followed no further.
        """
        fork = self._forks.get(attempt)
        return fork if fork is not None and fork.attempt < attempt else None

    def history(self, attempt: int, *, step: int | None = None) -> Iterator[RecordRow]:
        """
        Yield the visible commits of *attempt*, newest first, and below where it forked those that it came from.

        With *step* the history begins at that step or below. Two commits of one step are both yielded.
        Nothing is looked at before it is asked for, so a caller may stop where it likes.
        """
        segments = []
        below: int | None = step
        at: int | None = attempt
        while at is not None:
            rows = self.of_attempt(at)
            end = len(rows) if below is None else bisect_right(rows, below, key=_BY_STEP)
            if end:
                segments.append(rows[end - 1 :: -1])
            fork = self.fork_of(at)
            if fork is not None:
                below = fork.step if below is None else min(below, fork.step)
            at = None if fork is None else fork.attempt
        # As a rule one segment ends before the next begins; an attempt may also have saved below its own fork.
        return heapq.merge(*segments, key=_IN_HISTORY, reverse=True)

    @cached_property
    def turns(self) -> dict[tuple[int, int], int]:
        """
        Return the numbers that policies count saves by where these are not those of their records, by attempt and step.

        Numbers are given in the order of arrival. What was saved in full has decided nothing by its number, so the full
        saves with which an attempt begins are counted in the order of their steps: they share out the numbers that they
        have. From the first save that a policy chose the layers of on, all keep the numbers that decisions rest on
        (docs/adr/0028-counted-by-step.md).
        """
        found = {}
        for attempt, rows in self._by_attempt.items():
            if _is_sorted([row.save_number for row in rows]):
                continue
            first_chosen = min((row.save_number for row in rows if not row.is_full), default=math.inf)
            full = [row for row in rows if row.save_number < first_chosen]
            for row, number in zip(full, sorted(row.save_number for row in full), strict=True):
                if row.save_number != number:
                    found[attempt, row.step] = number
        return found

    @cached_property
    def _ordered(self) -> list[RecordRow]:
        return sorted(self.rows.values(), key=_IN_ORDER)

    @cached_property
    def _by_attempt(self) -> dict[int, list[RecordRow]]:
        return {attempt: list(rows) for attempt, rows in groupby(self.visible, key=_BY_ATTEMPT)}

    @cached_property
    def _forks(self) -> dict[int, Fork | None]:
        return {attempt: next(rows).fork for attempt, rows in groupby(self._ordered, key=_BY_ATTEMPT)}


def _is_sorted(numbers: list[int]) -> bool:
    return numbers == sorted(numbers)
