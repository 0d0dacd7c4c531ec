"""Which saves of a long history a report shows: as many as it has room for, and never only the middle ones."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

# More columns than this are narrower than a pointer on any screen.
COLUMNS_MAX = 360


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one run would like to show."""

    saves: int
    bytes_fixed: int
    """What it takes whatever is shown of it."""
    bytes_per_save: int


def shares(wishes: Sequence[Wish], *, bytes_max: int) -> list[int]:
    """
    Return how many saves each of *wishes* may show, so that all together take about *bytes_max*.

    What a small run leaves over goes to the larger ones. Where there are too many runs the last ones get nothing.

    >>> small, large = (Wish(saves=n, bytes_fixed=0, bytes_per_save=10) for n in (2, 500))
    >>> shares([small, large], bytes_max=1000), shares([large, large], bytes_max=15)
    ([2, 98], [1, 0])
    """
    found = [0] * len(wishes)
    left = bytes_max
    shown = []
    for index, wish in enumerate(wishes):
        least = wish.bytes_fixed + wish.bytes_per_save
        if wish.saves and least <= left:
            shown.append(index)
            left -= least
            found[index] = 1
    shown.sort(key=lambda index: wishes[index].saves * wishes[index].bytes_per_save)
    for place, index in enumerate(shown):
        wish = wishes[index]
        more = min(left // (len(shown) - place) // wish.bytes_per_save, wish.saves - 1, COLUMNS_MAX - 1)
        found[index] += more
        left -= more * wish.bytes_per_save
    return found


def chosen(count: int, *, room: int, wanted: Collection[int] = ()) -> list[int]:
    """
    Return which of *count* places are shown where there is *room* for so many, in order.

    The last one is among them, then the first, then as many of those *wanted* as half of the room holds; the others
    lie as evenly as may be.

    >>> chosen(5, room=9), chosen(100, room=5), chosen(100, room=6, wanted=[42]), chosen(100, room=1)
    ([0, 1, 2, 3, 4], [0, 17, 50, 82, 99], [0, 17, 42, 50, 82, 99], [99])
    """
    if count <= room:
        return list(range(count))
    found = {count - 1} if room == 1 else {0, count - 1}
    special = sorted(set(wanted) - found)
    found |= {special[place] for place in _evenly(len(special), max(0, room // 2 - len(found)))}
    rest = sorted(set(range(count)) - found)
    return sorted(found | {rest[place] for place in _evenly(len(rest), room - len(found))})


def _evenly(count: int, room: int) -> list[int]:
    """Return *room* of *count* places, as evenly as may be."""
    if count <= room:
        return list(range(count))
    return [(2 * step + 1) * count // (2 * room) for step in range(room)]
