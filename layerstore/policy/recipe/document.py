"""
YAML as plain nodes that know their place: bounded, and nothing in it is ever built or called.

Only the parser of the library is used, never its constructors: every value stays the text that was written,
so that ``on``, ``0100`` or ``1:30`` cannot become something else on the way.
Refused are tags, several documents, repeated keys, keys that are no plain text,
and aliases of anything but single values: those could name themselves, or unfold without end.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import yaml

from layerstore.errors import InvalidInput
from layerstore.limits import RECIPE_BYTES_MAX, RECIPE_DEPTH_MAX
from layerstore.policy.recipe.spots import Spot

# What the parser says of a slip -> what to do about it.
_QUOTING = {
    "'@'": 'quote what begins with @: "@1100"; a bare step needs no @',
    "alias": 'quote a pattern that begins with *: "*norm"',
    "'\\t'": "indent with spaces, not with tabs",
    "": "check the indentation, and quote what holds any of : # { } [ ] , & * ? | > @ % !",
}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A single value, as it was written."""

    text: str
    is_null: bool
    """Whether it is a plain ``null``, ``~`` or nothing at all."""
    spot: Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode:
    """A sequence."""

    items: tuple["Node", ...]
    spot: Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode:
    """A mapping; its keys are texts, and no two are equal."""

    entries: tuple[tuple[Scalar, "Node"], ...]
    spot: Spot

    def get(self, key: str) -> "Node | None":
        """Return the value of *key*; None where it is absent or null."""
        found = next((value for name, value in self.entries if name.text == key), None)
        return None if isinstance(found, Scalar) and found.is_null else found

    def key_spot(self, key: str) -> Spot:
        """Return where *key* stands; the mapping's own place where it does not."""
        return next((name.spot for name, _ in self.entries if name.text == key), self.spot)


Node = Scalar | ListNode | MapNode


def read_text(content: bytes, *, name: str) -> str:
    """
    Return the text of a recipe that was read as *content*.

    Raises:
        InvalidInput: It is not UTF-8, or larger than any recipe.
    """
    _check_size(len(content), name=name)
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        spot = _spot_of_index(content[: exc.start].decode(), exc.start, name=name)
        raise spot.error(
            f"the recipe is not UTF-8: byte {content[exc.start]:#04x}", hint="save it as UTF-8 text"
        ) from exc


def read_document(text: str, *, name: str) -> Node:
    """
    Return the one document in *text*; *name* is what errors call the file.

    Raises:
        InvalidInput: It is no YAML, or YAML of a kind that no recipe needs; with line and column.
    """
    _check_size(len(text.encode(errors="surrogatepass")), name=name)
    if yaml.__with_libyaml__:
        # Ten times as fast. What it refuses is read once more, for one kind of words and places in errors.
        with contextlib.suppress(ValueError, yaml.YAMLError):
            return _Reader(text, name=name, parser=yaml.CSafeLoader).document()
    return _Reader(text, name=name, parser=yaml.SafeLoader).document()


def _check_size(size_bytes: int, *, name: str) -> None:
    if size_bytes > RECIPE_BYTES_MAX:
        raise InvalidInput(
            f"{name}: {size_bytes} bytes are too many for a recipe; at most {RECIPE_BYTES_MAX} are read",
            hint="write ranges of layers instead of one entry for each",
        )


def _spot_of_index(text: str, index: int, *, name: str) -> Spot:
    before = text[:index]
    return Spot(file=name, line=before.count("\n") + 1, column=index - before.rfind("\n"))


class _Reader:
    """Turns the parser's events into nodes."""

    def __init__(self, text: str, *, name: str, parser: Callable[[str], Any]) -> None:
        self._name = name
        self._scalars: dict[str, Scalar] = {}
        self._others: set[str] = set()
        try:
            self._loader = parser(text)
        except yaml.reader.ReaderError as exc:
            spot = _spot_of_index(text, exc.position, name=name)
            raise spot.error(
                f"the character U+{int(exc.character):04X} is not allowed in YAML", hint="remove it"
            ) from exc

    def document(self) -> Node:
        self._next()  # the stream's start
        start = self._next()
        if isinstance(start, yaml.StreamEndEvent):
            raise self._spot(start.start_mark).error("the recipe is empty", hint="write base: and layers:")
        found = self._node(self._next(), depth=1)
        self._next()  # the document's end
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._spot(after.start_mark).error(
                "a second document begins here", hint="keep each recipe in a file of its own"
            )
        return found

    def _next(self) -> yaml.Event:
        try:
            return self._loader.get_event()
        except yaml.MarkedYAMLError as exc:
            self._refuse_syntax(exc)
        except (ValueError, OverflowError) as exc:  # numbers in escapes and directives that no character has
            spot = self._spot(self._loader.get_mark())
            raise spot.error("this is not YAML: a number is out of range", hint="remove the escape") from exc

    def _refuse_syntax(self, exc: yaml.MarkedYAMLError) -> NoReturn:
        mark = exc.problem_mark or exc.context_mark or self._loader.get_mark()
        problem = str(exc.problem or exc.context)
        said = f"{exc.context} {problem}"
        hint = next((better for sign, better in _QUOTING.items() if sign in said), _QUOTING[""])
        raise self._spot(mark).error(f"this is not YAML: {problem}", hint=hint) from exc

    def _spot(self, mark: yaml.Mark) -> Spot:
        return Spot(file=self._name, line=mark.line + 1, column=mark.column + 1)

    def _node(self, event: yaml.Event, *, depth: int) -> Node:
        spot = self._spot(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            return self._alias(cast("str", event.anchor), spot)
        if event.tag is not None:
            raise spot.error(f"the tag {event.tag!r} is not allowed", hint="write the value without a tag")
        if depth > RECIPE_DEPTH_MAX:
            raise spot.error(f"this is nested more than {RECIPE_DEPTH_MAX} deep", hint="no recipe needs that")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, spot)
        if event.anchor is not None:
            self._others.add(event.anchor)
        if isinstance(event, yaml.SequenceStartEvent):
            items = tuple(self._node(item, depth=depth + 1) for item in self._until(yaml.SequenceEndEvent))
            return ListNode(items=items, spot=spot)
        return self._mapping(spot, depth=depth)

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        while not isinstance(event := self._next(), end):
            yield event

    def _scalar(self, event: yaml.ScalarEvent, spot: Spot) -> Scalar:
        is_plain = not event.style
        found = Scalar(text=event.value, is_null=is_plain and event.value in _NULLS, spot=spot)
        if event.anchor is not None:
            self._scalars[event.anchor] = found
        return found

    def _alias(self, anchor: str, spot: Spot) -> Scalar:
        if anchor in self._others:
            raise spot.error(
                f"*{anchor} stands for a list or a mapping; only single values may be repeated so",
                hint="write it out here",
            )
        if anchor not in self._scalars:
            raise spot.error(f"there is no anchor &{anchor} before this", hint=_QUOTING["alias"])
        value = self._scalars[anchor]
        return Scalar(text=value.text, is_null=value.is_null, spot=spot)

    def _mapping(self, spot: Spot, *, depth: int) -> MapNode:
        entries: dict[str, tuple[Scalar, Node]] = {}
        for event in self._until(yaml.MappingEndEvent):
            key = self._node(event, depth=depth + 1)
            if not isinstance(key, Scalar):
                raise key.spot.error("a list or a mapping is no key", hint="quote a key that begins with [ or {")
            if key.text in entries:
                first = entries[key.text][0].spot.line
                raise key.spot.error(
                    f"{key.text!r} stands here for the second time, first in line {first}", hint="keep one of the two"
                )
            entries[key.text] = (key, self._node(self._next(), depth=depth + 1))
        return MapNode(entries=tuple(entries.values()), spot=spot)
