"""
Searches that ask as few questions as they can: the first bad item of a row, and a minimal bad set.

The functions are pure: *judge* gives the answers, and must cache them if they are expensive.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

TrialVerdict = Literal["good", "bad", "skip"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Where a row turns from good to bad."""

    good: int
    bad: int
    skipped: tuple[int, ...]
    """The items between *good* and *bad* that could not be judged."""


def first_bad(count: int, judge: Callable[[int], TrialVerdict]) -> Boundary:
    """Return where a row of *count* items, whose first is good and whose last is bad, turns bad."""
    good, bad = 0, count - 1
    skipped: set[int] = set()
    while between := [index for index in range(good + 1, bad) if index not in skipped]:
        middle = between[len(between) // 2]
        verdict = judge(middle)
        if verdict == "good":
            good = middle
        elif verdict == "bad":
            bad = middle
        else:
            skipped.add(middle)
    return Boundary(good=good, bad=bad, skipped=tuple(sorted(index for index in skipped if good < index < bad)))


def suspect(items: Sequence[Item], judge: Callable[[frozenset[Item]], TrialVerdict]) -> Item | None:
    """
    Return the only one of *items* that can be bad alone, given that all together are bad and the empty set is good.

    Needs about log2(n) questions: if one half is good, the other is taken to be bad. None if a half could not be
    judged, or if there are no items.
    """
    rest = list(items)
    while len(rest) > 1:
        half = rest[: len(rest) // 2]
        verdict = judge(frozenset(half))
        if verdict == "skip":
            return None
        rest = half if verdict == "bad" else rest[len(rest) // 2 :]
    return rest[0] if rest else None


def bad_together(items: tuple[Item, ...], judge: Callable[[frozenset[Item]], TrialVerdict]) -> tuple[Item, ...] | None:
    """
    Return a minimal bad set of *items*, given that all together are bad and the empty set is good.

    By delta debugging: no item can be left out of the set. None if that is unknown, as some part could not be judged.
    """
    parts, has_skipped = 2, False
    while len(items) > 1:
        pieces = list(_pieces(items, parts))
        smaller: tuple[Item, ...] | None = None
        for number, piece in enumerate(
            # With two pieces, leaving one out gives the other one, which is judged anyway.
            [*pieces, *(_without(items, left_out) for left_out in pieces if len(pieces) > 2)]
        ):
            verdict = judge(frozenset(piece))
            has_skipped |= verdict == "skip"
            if verdict == "bad":
                # If one piece alone is bad, halve it. If all pieces but one are bad together, keep the pieces' size.
                smaller, parts = piece, 2 if number < len(pieces) else max(parts - 1, 2)
                break
        if smaller is not None:
            items = smaller
        elif parts >= len(items):
            return None if has_skipped else items
        else:
            parts = min(2 * parts, len(items))
    return items


def _pieces(items: Sequence[Item], count: int) -> Iterator[tuple[Item, ...]]:
    """Cut *items* into *count* pieces of about the same length."""
    ends = [len(items) * number // count for number in range(count + 1)]
    for begin, end in pairwise(ends):
        yield tuple(items[begin:end])


def _without(items: Sequence[Item], piece: Iterable[Item]) -> tuple[Item, ...]:
    left = set(piece)
    return tuple(item for item in items if item not in left)
