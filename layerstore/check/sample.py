"""Which objects a verify reads, if not all: a slice of all ids, which are as good as random numbers."""

import random
import re
from dataclasses import dataclass

from layerstore.errors import InvalidInput
from layerstore.model import BlobRef

_ALL = 2**32
_PERCENT = re.compile(r"(?P<percent>[0-9]{1,3}(\.[0-9]{1,6})?)%")
_SLICE = re.compile(r"(?P<number>[0-9]{1,6})/(?P<of>[0-9]{1,6})")
_SEED_MAX = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The objects whose ids lie in one stretch of all ids; the last id is followed by the first."""

    begin: int
    """Of the first 32 bits of an id."""
    length: int
    words: str
    """What it is, for people; with it the same objects are read again."""

    def __contains__(self, ref: object) -> bool:
        """Whether *ref* is one of them."""
        return isinstance(ref, BlobRef) and (int(ref.id[:8], 16) - self.begin) % _ALL < self.length


def parse_sample(text: str, *, seed: int | None = None) -> Sample:
    """
    Read ``10%``, any tenth, or ``3/10``, the third of ten tenths that together are everything.

    A tenth is of the objects, not of their bytes. Which one is decided by *seed*, else at random.

    >>> [sample.begin for sample in (parse_sample("1/4"), parse_sample("4/4"))]
    [0, 3221225472]
    """
    if match := _SLICE.fullmatch(text):
        number, of = int(match["number"]), int(match["of"])
        if seed is not None:
            raise InvalidInput(f"{text} is always the same objects; a seed is for percentages", hint="leave it out")
        if 1 <= number <= of:
            begin = (number - 1) * _ALL // of
            return Sample(begin=begin, length=number * _ALL // of - begin, words=text)
    if match := _PERCENT.fullmatch(text):
        share = float(match["percent"]) / 100
        if 0 < share <= 1:
            seed = random.randrange(_SEED_MAX) if seed is None else seed
            begin = random.Random(seed).randrange(_ALL)
            return Sample(begin=begin, length=max(1, round(share * _ALL)), words=f"{text}, seed {seed}")
    raise InvalidInput(
        f"{text!r} is no part of the objects", hint="10% reads any tenth; 1/10 to 10/10 read everything in ten nights"
    )
