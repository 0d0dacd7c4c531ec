"""The searches ask as few questions as they may, and find what is there."""

from itertools import combinations
from math import ceil, log2

import pytest

from layerstore.bisect.search import TrialVerdict, bad_together, first_bad, suspect


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 9, 40])
def test_the_first_bad_of_a_row_is_found(count: int) -> None:
    """Wherever it is, with log2 questions."""
    for turn in range(1, count):
        asked: list[int] = []

        def judge(index: int, turn: int = turn, asked: list[int] = asked) -> TrialVerdict:
            asked.append(index)
            return "bad" if index >= turn else "good"

        found = first_bad(count, judge)
        assert (found.good, found.bad, found.skipped) == (turn - 1, turn, ())
        assert len(asked) == len(set(asked)) <= ceil(log2(count))


def test_what_cannot_be_judged_is_left_out() -> None:
    """The boundary is as narrow as the verdicts allow."""
    found = first_bad(10, lambda index: "skip" if index in {4, 5, 6} else "bad" if index > 5 else "good")
    assert (found.good, found.bad, found.skipped) == (3, 7, (4, 5, 6))


@pytest.mark.parametrize("count", [1, 2, 3, 14, 33])
def test_one_item_that_suffices_is_found(count: int) -> None:
    """Whichever it is, with log2 questions."""
    for culprit in range(count):
        asked: list[frozenset[int]] = []

        def judge(chosen: frozenset[int], culprit: int = culprit, asked: list[frozenset[int]] = asked) -> TrialVerdict:
            asked.append(chosen)
            return "bad" if culprit in chosen else "good"

        assert suspect(range(count), judge) == culprit
        assert len(asked) <= ceil(log2(count))


def test_items_that_act_only_together_are_found() -> None:
    """All pairs of ten, and a set of three."""
    for culprits in [*combinations(range(10), 2), (1, 5, 8)]:

        def judge(chosen: frozenset[int], of: frozenset[int] = frozenset(culprits)) -> TrialVerdict:
            return "bad" if of <= chosen else "good"

        assert bad_together(tuple(range(10)), judge) == culprits


def test_of_several_that_suffice_one_is_found() -> None:
    """It cannot be told which of them did it."""
    found = suspect(range(12), lambda chosen: "bad" if chosen & {2, 9} else "good")
    assert found in {2, 9}


def test_too_much_that_cannot_be_judged_ends_without_an_answer() -> None:
    """Nothing is claimed then."""
    for search in (suspect, bad_together):
        assert search(tuple(range(6)), lambda chosen: "bad" if len(chosen) == 6 else "skip") is None
