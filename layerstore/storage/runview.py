"""
One run as its records stand: what is visible, which attempts there are, and the history of each.

Everything is derived from the rows when it is first asked for, and kept: a view never changes.
"""

import heapq
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
        return [row for row in self._ordered if row.id not in hidden]

    @cached_property
    def attempts(self) -> list[int]:
        """The attempts that have visible commits, oldest first."""
        return list(self._by_attempt)

    def of_attempt(self, attempt: int) -> list[RecordRow]:
        """Return the visible commits of *attempt* itself, by step."""
        return self._by_attempt.get(attempt, [])

    def fork_of(self, attempt: int) -> Fork | None:
        """
        Return where *attempt* left an earlier one; every record of a later attempt says it, too.

        Attempts are numbered in order: a record that claims to have left a later one is followed no further.
        """
        fork = self._forks.get(attempt)
        return fork if fork is not None and fork.attempt < attempt else None

    def lineage_of(self, attempt: int) -> tuple[Fork, ...]:
        """Return where *attempt* forked off, where the one before it did, and so on."""
        found = []
        fork = self.fork_of(attempt)
        while fork is not None:
            found.append(fork)
            fork = self.fork_of(fork.attempt)
        return tuple(found)

    def history(self, attempt: int, *, step: int | None = None) -> Iterator[RecordRow]:
        """
        Yield the visible commits of *attempt*, newest first, and below where it forked those that it came from.

        With *step* the history begins at that step or below. Two commits of one step are both yielded.
        Nothing is looked at before it is asked for, so a caller may stop where it likes.
        """
        segments = [rows[::-1] for rows in self._segments(attempt, step)]
        # As a rule one segment ends before the next begins; an attempt may also have saved below its own fork.
        return heapq.merge(*segments, key=_IN_HISTORY, reverse=True)

    def number_at(self, attempt: int, step: int, *, default: RecordRow) -> int:
        """
        Return the number of the save at *step* in *attempt*'s history, counted by step from the oldest one's own.

        Where nothing is visible there, it is that of *default*.
        """
        segments = self._segments(attempt, step)
        if not segments:
            return default.save_number
        oldest = min((rows[0] for rows in segments), key=_IN_HISTORY)
        return oldest.save_number + sum(map(len, segments)) - 1

    def _segments(self, attempt: int, step: int | None) -> list[list[RecordRow]]:
        """Return the visible commits of *attempt* up to *step*, and those of each attempt that it descends from."""
        segments = []
        below: int | None = step
        at: int | None = attempt
        while at is not None:
            rows = self.of_attempt(at)
            end = len(rows) if below is None else bisect_right(rows, below, key=_BY_STEP)
            if end:
                segments.append(rows[:end])
            fork = self.fork_of(at)
            if fork is not None:
                below = fork.step if below is None else min(below, fork.step)
            at = None if fork is None else fork.attempt
        return segments

    @cached_property
    def _ordered(self) -> list[RecordRow]:
        return sorted(self.rows.values(), key=_IN_ORDER)

    @cached_property
    def _by_attempt(self) -> dict[int, list[RecordRow]]:
        return {attempt: list(rows) for attempt, rows in groupby(self.visible, key=_BY_ATTEMPT)}

    @cached_property
    def _forks(self) -> dict[int, Fork | None]:
        found: dict[int, Fork | None] = {}
        for row in self._ordered:
            attempt = row.attempt
            for fork in row.lineage:
                found.setdefault(attempt, fork)
                attempt = fork.attempt
            found.setdefault(attempt, None)
        return found
