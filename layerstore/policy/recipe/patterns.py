"""
Patterns of layer names.

``*`` stands for any text, ``?`` for one character, and ``[…]`` for one whole number:
``[0-3]``, ``[0-3,8]``, ``[28-]`` (to the end), ``[even]``, ``[odd]``.
So ``[10-20]`` means what it says, which it does not in the patterns of a shell.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from layerstore.policy.recipe.document import Scalar
from layerstore.policy.recipe.names import listed, near
from layerstore.policy.recipe.spots import Spot

_TOKEN = re.compile(r"(?P<any>\*+)|(?P<one>\?)|\[(?P<indices>[^\[\]]*)\]|(?P<text>[^*?\[\]]+)")
_ITEM = re.compile(r"(?P<first>0|[1-9]\d{0,8})(?P<range>-(?P<last>0|[1-9]\d{0,8})?)?", re.ASCII)
_PARITY = {"even": 0, "odd": 1}
# No model has a block of a higher index, and longer runs of digits are not worth reading.
_DIGITS_MAX = 9


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text."""

    text: str


@dataclass(frozen=True, slots=True)
class Wildcard:
    """Any one character, or any text at all."""

    is_any: bool


@dataclass(frozen=True, slots=True)
class Indices:
    """A whole number out of some."""

    ranges: tuple[tuple[int, int | None], ...]
    """First and last; None for no end."""
    parities: tuple[int, ...]

    def holds(self, index: int) -> bool:
        """Whether *index* is one of them."""
        in_ranges = any(first <= index and (last is None or index <= last) for first, last in self.ranges)
        return in_ranges or index % 2 in self.parities

    def written(self) -> Iterator[int]:
        """Yield the numbers that were written down."""
        for first, last in self.ranges:
            yield from {first, first if last is None else last}


Token = Text | Wildcard | Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Which layers an entry means."""

    text: str
    tokens: tuple[Token, ...]
    spot: Spot

    def layers(self, names: Iterable[str]) -> list[str]:
        """
        Return those of *names* that the pattern means.

        Raises:
            InvalidInput: There is none, or none has a number that is written in brackets.
        """
        known = list(names)
        is_name = len(self.tokens) == 1 and isinstance(self.tokens[0], Text)
        found = [name for name in known if (name == self.text if is_name else _fits(self.tokens, name))]
        if not found:
            hint = near(self.text, known, what="layers of this model")
            raise self.spot.error(f"no layer of the model is called {self.text!r}", hint=hint)
        self._check_numbers(found)
        return found

    def _check_numbers(self, found: list[str]) -> None:
        for position, token in enumerate(self.tokens):
            for number in token.written() if isinstance(token, Indices) else ():
                only = Indices(ranges=((number, number),), parities=())
                narrowed = (*self.tokens[:position], only, *self.tokens[position + 1 :])
                if not any(_fits(narrowed, name) for name in found):
                    raise self.spot.error(
                        f"{self.text!r} names index {number}, which no layer has", hint=f"it fits {listed(found)}"
                    )


def read_pattern(key: Scalar) -> Pattern:
    """Return the pattern that *key* spells."""
    tokens: list[Token] = []
    end = 0
    for match in _TOKEN.finditer(key.text):
        if match.start() != end:
            break
        end = match.end()
        if match["indices"] is not None:
            tokens.append(_indices(match["indices"], key))
        else:
            tokens.append(Text(match["text"]) if match["text"] else Wildcard(is_any=bool(match["any"])))
    if end != len(key.text):
        raise key.spot.error(f"{key.text!r} has a bracket without its partner", hint="numbers are written [0-3]")
    if not tokens:
        raise key.spot.error("an empty name fits no layer", hint="name a layer, or several with * and [0-3]")
    return Pattern(text=key.text, tokens=tuple(tokens), spot=key.spot)


def _indices(text: str, key: Scalar) -> Indices:
    ranges: list[tuple[int, int | None]] = []
    parities: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        match = _ITEM.fullmatch(item)
        if item in _PARITY:
            parities.append(_PARITY[item])
        elif match is None:
            raise key.spot.error(
                f"{item!r} in {key.text!r} is no range of numbers", hint="write [0-3], [0-3,8], [28-], [even] or [odd]"
            )
        else:
            ranges.append(_range(match, key))
    return Indices(ranges=tuple(ranges), parities=tuple(parities))


def _range(match: re.Match[str], key: Scalar) -> tuple[int, int | None]:
    first = int(match["first"])
    if match["range"] is None:
        return first, first
    if match["last"] is None:
        return first, None
    last = int(match["last"])
    if last < first:
        raise key.spot.error(
            f"the range {match.group()} in {key.text!r} is empty", hint="write the smaller number first; both count"
        )
    return first, last


def _fits(tokens: Iterable[Token], name: str) -> bool:
    """
    Whether *tokens* spell *name*.

    All places that the tokens so far can lead to are carried along, so no pattern takes longer than its length
    times the name's.
    """
    places = {0}
    for token in tokens:
        if not places:
            return False
        if isinstance(token, Wildcard) and token.is_any:
            places = set(range(min(places), len(name) + 1))
        else:
            places = {after for place in places for after in _step(token, name, place)}
    return len(name) in places


def _step(token: Token, name: str, place: int) -> list[int]:
    if isinstance(token, Text):
        return [place + len(token.text)] if name.startswith(token.text, place) else []
    if isinstance(token, Wildcard):
        return [place + 1] if place < len(name) else []
    if place and name[place - 1].isdecimal():
        return []  # in the middle of a number
    end = place
    while end < len(name) and name[end].isdecimal():
        end += 1
    is_number = 0 < end - place <= _DIGITS_MAX
    return [end] if is_number and token.holds(int(name[place:end])) else []
