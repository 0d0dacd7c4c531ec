"""
Patterns of layer names: recipes use them to select layers, and messages to shorten lists of layers.

``*`` matches any text, ``?`` one character, and ``[…]`` one whole number:
``[0-3]``, ``[0-3,8]``, ``[28-]`` (to the end), ``[even]``, ``[odd]``. Unlike in a shell, ``[10-20]`` is 10 to 20.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from layerstore.layers import block_index
from layerstore.nearest import did_you_mean, nearest
from layerstore.policy.recipe.document import Scalar, Spot

_TOKEN = re.compile(r"(?P<any>\*+)|\[(?P<indices>[^\[\]]*)\]|\?|[^*?\[\]]+")
_ITEM = re.compile(r"(?P<first>0|[1-9]\d{0,8})(?P<range>-(?P<last>0|[1-9]\d{0,8})?)?", re.ASCII)
_PARITY = {"even": 0, "odd": 1}
_DIGITS_MAX = 9  # of a block's index
_ANY, _ONE = "*", "?"
_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class _Indices:
    """Matches one whole number of a set."""

    ranges: tuple[tuple[int, int | None], ...]
    """First and last; None for no end."""
    parities: tuple[int, ...]

    def holds(self, index: int) -> bool:
        in_ranges = any(first <= index and (last is None or index <= last) for first, last in self.ranges)
        return in_ranges or index % 2 in self.parities


_Token = str | _Indices
"""A set of numbers, ``*``, ``?``, or any other text, which matches literally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The layers that an entry is for."""

    text: str
    tokens: tuple[_Token, ...]
    spot: Spot

    def layers(self, names: Iterable[str]) -> list[str]:
        """
        Return those of *names* that the pattern fits.

        Raises:
            InvalidInput: The pattern fits no name, or one of the numbers in its brackets is in no name that it fits.
        """
        known = list(names)
        if self.tokens == (self.text,) and self.text not in {_ANY, _ONE}:
            fitting = [self.text] if self.text in known else []  # without a wildcard, as in most recipes
        else:
            fitting = [name for name in known if _fits(self.tokens, name)]
        if not fitting:
            hint = near(self.text, known, what="layers of this model")
            raise self.spot.error(f"no layer of the model is called {self.text!r}", hint=hint)
        for position, token in enumerate(self.tokens):
            for first_and_last in token.ranges if isinstance(token, _Indices) else ():
                for number in first_and_last:
                    if number is not None:
                        self._check_number(position, number, fitting)
        return fitting

    def _check_number(self, position: int, number: int, fitting: list[str]) -> None:
        only = _Indices(ranges=((number, number),), parities=())
        narrowed = (*self.tokens[:position], only, *self.tokens[position + 1 :])
        if not any(_fits(narrowed, name) for name in fitting):
            raise self.spot.error(
                f"{self.text!r} names index {number}, which no layer has", hint=f"the pattern fits {listed(fitting)}"
            )


def read_pattern(key: Scalar) -> Pattern:
    """Parse the pattern *key*."""
    tokens: list[_Token] = []
    end = 0
    for match in _TOKEN.finditer(key.text):
        if match.start() != end:
            break
        end = match.end()
        if match["indices"] is not None:
            tokens.append(_indices(match["indices"], key))
        else:
            tokens.append(_ANY if match["any"] else match.group())
    if end != len(key.text):
        raise key.spot.error(f"{key.text!r} has an unmatched bracket", hint="numbers are written [0-3]")
    if not tokens:
        raise key.spot.error("an empty name fits no layer", hint="name a layer, or several with * and [0-3]")
    return Pattern(text=key.text, tokens=tuple(tokens), spot=key.spot)


def pattern_of(text: str, *, name: str) -> Pattern:
    """Parse the pattern *text*, which does not come from a file; errors give *name* as its origin."""
    return read_pattern(Scalar(text=text, is_null=False, spot=Spot(file=name, line=0, column=0)))


def _indices(text: str, key: Scalar) -> _Indices:
    ranges: list[tuple[int, int | None]] = []
    parities: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        match = _ITEM.fullmatch(item)
        if item in _PARITY:
            parities.append(_PARITY[item])
            continue
        if match is None:
            raise key.spot.error(
                f"{item!r} in {key.text!r} is not a range of numbers",
                hint="write [0-3], [0-3,8], [28-], [even] or [odd]",
            )
        first = int(match["first"])
        last = int(match["last"]) if match["last"] else None if match["range"] else first
        if last is not None and last < first:
            raise key.spot.error(f"the range {item} in {key.text!r} is empty", hint="write the smaller number first")
        ranges.append((first, last))
    return _Indices(ranges=tuple(ranges), parities=tuple(parities))


def _fits(tokens: Iterable[_Token], name: str) -> bool:
    # Track all positions in the name that the tokens so far can lead to. Without backtracking, the time is bounded by
    # the pattern's length times the name's length.
    places = {0}
    for token in tokens:
        if not places:
            return False
        if token == _ANY:
            places = set(range(min(places), len(name) + 1))
        else:
            places = {after for place in places for after in _step(token, name, place)}
    return len(name) in places


def _step(token: _Token, name: str, place: int) -> list[int]:
    if token == _ONE:
        return [place + 1] if place < len(name) else []
    if isinstance(token, str):
        return [place + len(token)] if name.startswith(token, place) else []
    if place and name[place - 1].isdecimal():
        return []  # in the middle of a number
    end = place
    while end < len(name) and name[end].isdecimal():
        end += 1
    is_number = 0 < end - place <= _DIGITS_MAX
    return [end] if is_number and token.holds(int(name[place:end])) else []


# -- names in messages ---------------------------------------------------------------------------------------------


def gathered(names: Iterable[str]) -> list[str]:
    """
    Return *names* with the blocks of each stack as one pattern.

    >>> gathered(["lm_head", "model.layers.0", "model.layers.1", "model.layers.2", "model.layers.5"])
    ['lm_head', 'model.layers.[0-2,5]']
    >>> gathered(["model.layers.7"])
    ['model.layers.7']
    """
    indices: dict[tuple[str, bool], list[int]] = {}
    for name in names:
        index = block_index(name)
        if index is None:
            indices[name, False] = []
        else:
            indices.setdefault((name[: len(name) - len(name.rpartition(".")[2])], True), []).append(index)
    return [stack + _brackets(sorted(numbers)) for (stack, _), numbers in indices.items()]


def _brackets(indices: list[int]) -> str:
    if len(indices) < 2:
        return "".join(map(str, indices))
    starts = [indices[0], *(after for before, after in pairwise(indices) if after != before + 1)]
    ends = [*(before for before, after in pairwise(indices) if after != before + 1), indices[-1]]
    runs = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"[{','.join(runs)}]"


def listed(names: Iterable[str]) -> str:
    """
    Return *names* gathered on one line, truncating long lists.

    >>> listed(f"extra_{letter}" for letter in "abcdefghijk")
    'extra_a, extra_b, extra_c, extra_d, extra_e, extra_f, extra_g, extra_h and 3 more'
    """
    patterns = gathered(names)
    more = len(patterns) - _SHOWN_MAX
    return ", ".join(patterns[:_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def near(name: str, names: Iterable[str], *, what: str) -> str:
    """Return a hint for *name*: those of *names* that resemble it or, if none does, all of them."""
    known = list(names)
    # A block's index makes similar names look different, so compare spellings with and without it.
    plain = {spelling: shown for shown in gathered(known) for spelling in (shown, shown.partition("[")[0])}
    close = dict.fromkeys(plain[spelling] for spelling in nearest(name, plain))
    return did_you_mean(close, else_="" if close else f"{what}: {listed(known)}")
