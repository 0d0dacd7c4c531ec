"""
Read YAML as plain nodes that know their position in the file, and check the type of each node.

We use only the library's parser, never its constructors: every value stays the text that was written, so ``on``,
``0100`` or ``1:30`` cannot turn into something else. We refuse tags, several documents, repeated keys, keys that are
not text, and aliases of lists or mappings (which could refer to themselves, or expand without end).
We read events, not the nodes of ``yaml.compose``: in these nodes, an alias has the position of its anchor, and a tag
that the user wrote looks like a tag that the library guessed.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import yaml

from layerstore.errors import InvalidInput, LayerstoreError
from layerstore.limits import RECIPE_DEPTH_MAX
from layerstore.nearest import did_you_mean, nearest

# From a word in the parser's message to our hint; the first match is used.
_QUOTING = {
    "'@'": 'quote what begins with @: "@1100"; a bare step needs no @',
    "alias": 'quote a pattern that begins with *: "*norm"',
    "'\\t'": "indent with spaces, not with tabs",
    "": "check the indentation, and quote text that has any of : # { } [ ] , & * ? | > @ % !",
}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_OCTAL = re.compile(r"-?0[0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A position in a recipe."""

    file: str
    """The file's path as the user gave it."""
    line: int
    """Counted from 1; 0 if *file* is not a file's path."""
    column: int
    """Counted from 1, in characters."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file

    def error(self, message: str, *, hint: str) -> InvalidInput:
        """Return an error about this position."""
        return InvalidInput(f"{self}: {message}", hint=hint, file=self.file, line=self.line, column=self.column)

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Make our errors in this block begin with this position; class, hint and facts stay the same."""
        try:
            yield
        except LayerstoreError as problem:
            problem.locate(self)
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A single value, as it was written."""

    text: str
    is_null: bool
    """Whether the value is a plain ``null`` or ``~``, or empty."""
    spot: Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class ListNode:
    """A YAML sequence."""

    items: tuple["Node", ...]
    spot: Spot


@dataclass(frozen=True, slots=True, kw_only=True)
class MapNode:
    """A mapping with distinct texts as keys."""

    entries: tuple[tuple[Scalar, "Node"], ...]
    spot: Spot

    def get(self, key: str) -> "Node | None":
        """Return the value of *key*; None if the key is absent or the value null."""
        node = next((value for name, value in self.entries if name.text == key), None)
        return None if isinstance(node, Scalar) and node.is_null else node

    def key_spot(self, key: str) -> Spot:
        """Return the position of *key* or, if the key is absent, of the mapping."""
        return next((name.spot for name, _ in self.entries if name.text == key), self.spot)


Node = Scalar | ListNode | MapNode


def read_text(content: bytes, *, name: str) -> str:
    """
    Decode the bytes of a recipe.

    Raises:
        InvalidInput: *content* is not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as exc:
        spot = _spot_of_index(content[: exc.start].decode(), exc.start, name=name)
        raise spot.error(
            f"the recipe is not UTF-8: byte {content[exc.start]:#04x}", hint="save it as UTF-8 text"
        ) from exc


def read_document(text: str, *, name: str) -> Node:
    """
    Return the only document in *text*; *name* is the file's name in errors.

    Raises:
        InvalidInput: *text* is not YAML, or uses a YAML feature not allowed in recipes; states line and column.
    """
    if yaml.__with_libyaml__:
        # The C parser is ten times as fast. If it refuses the text, the Python parser rereads the text, so that all
        # messages and positions come from the Python parser.
        with contextlib.suppress(ValueError, yaml.YAMLError):
            return _DocumentReader(text, name=name, parser=yaml.CSafeLoader).document()
    return _DocumentReader(text, name=name, parser=yaml.SafeLoader).document()


def _spot_of_index(text: str, index: int, *, name: str) -> Spot:
    before = text[:index]
    return Spot(file=name, line=before.count("\n") + 1, column=index - before.rfind("\n"))


class _DocumentReader:
    """Turns the parser's events into nodes."""

    def __init__(self, text: str, *, name: str, parser: Callable[[str], Any]) -> None:
        self._name = name
        self._scalars: dict[str | None, Scalar] = {}  # by anchor
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
        node = self._node(self._next(), depth=1)
        self._next()  # the document's end
        after = self._next()
        if not isinstance(after, yaml.StreamEndEvent):
            raise self._spot(after.start_mark).error(
                "a second document begins here", hint="keep each recipe in a file of its own"
            )
        return node

    def _next(self) -> yaml.Event:
        try:
            return self._loader.get_event()
        except yaml.MarkedYAMLError as exc:
            self._refuse_syntax(exc)
        except (ValueError, OverflowError) as exc:  # an escape or a directive with a huge number
            spot = self._spot(self._loader.get_mark())
            raise spot.error("this is not YAML: a number is out of range", hint="remove the escape") from exc

    def _refuse_syntax(self, exc: yaml.MarkedYAMLError) -> NoReturn:
        mark = exc.problem_mark or exc.context_mark or self._loader.get_mark()
        problem = str(exc.problem or exc.context)
        message = f"{exc.context} {problem}"
        hint = next((better for sign, better in _QUOTING.items() if sign in message), _QUOTING[""])
        raise self._spot(mark).error(f"this is not YAML: {problem}", hint=hint) from exc

    def _spot(self, mark: yaml.Mark) -> Spot:
        return Spot(file=self._name, line=mark.line + 1, column=mark.column + 1)

    def _node(self, event: yaml.Event, *, depth: int) -> Node:
        spot = self._spot(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._scalars:
                hint = f"only single values may be repeated; {_QUOTING['alias']}"
                raise spot.error(f"there is no anchor &{event.anchor} of a single value before this", hint=hint)
            return replace(self._scalars[event.anchor], spot=spot)
        if event.tag is not None:
            raise spot.error(f"the tag {event.tag!r} is not allowed", hint="write the value without a tag")
        if depth > RECIPE_DEPTH_MAX:
            raise spot.error(f"this is nested more than {RECIPE_DEPTH_MAX} deep", hint="no recipe needs that")
        if isinstance(event, yaml.ScalarEvent):
            scalar = Scalar(text=event.value, is_null=not event.style and event.value in _NULLS, spot=spot)
            if event.anchor is not None:
                self._scalars[event.anchor] = scalar
            return scalar
        self._scalars.pop(event.anchor, None)  # its anchor no longer stands for a scalar, so aliases are refused
        if isinstance(event, yaml.SequenceStartEvent):
            items = tuple(self._node(item, depth=depth + 1) for item in self._until(yaml.SequenceEndEvent))
            return ListNode(items=items, spot=spot)
        return self._mapping(spot, depth=depth)

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        while not isinstance(event := self._next(), end):
            yield event

    def _mapping(self, spot: Spot, *, depth: int) -> MapNode:
        entries: dict[str, tuple[Scalar, Node]] = {}
        for event in self._until(yaml.MappingEndEvent):
            key = self._node(event, depth=depth + 1)
            if not isinstance(key, Scalar):
                raise key.spot.error("a list or a mapping is not a key", hint="quote a key that begins with [ or {")
            if key.text in entries:
                first = entries[key.text][0].spot.line
                raise key.spot.error(
                    f"{key.text!r} appears a second time here, first in line {first}", hint="keep one of the two"
                )
            entries[key.text] = (key, self._node(self._next(), depth=depth + 1))
        return MapNode(entries=tuple(entries.values()), spot=spot)


# -- typed access --------------------------------------------------------------------------------------------------


def as_map(node: Node, *, what: str, keys: Collection[str]) -> MapNode:
    """Return *node*; raise InvalidInput unless it is a mapping whose keys are all in *keys*."""
    if not isinstance(node, MapNode):
        raise _unlike(node, what=what, expected=f"a mapping with {', '.join(keys)}")
    for key, _ in node.entries:
        if key.text not in keys:
            meant = nearest(key.text, keys)
            hint = did_you_mean(meant, else_="" if meant else f"keys here: {', '.join(keys)}")
            raise key.spot.error(f"{what} has no key {key.text!r}", hint=hint)
    return node


def as_list(node: Node, *, what: str) -> ListNode:
    """Return *node*; raise InvalidInput unless it is a list."""
    if not isinstance(node, ListNode):
        raise _unlike(node, what=what, expected="a list")
    return node


def as_scalar(node: Node, *, what: str) -> Scalar:
    """Return *node*; raise InvalidInput unless it is a single value that is not empty."""
    if not isinstance(node, Scalar) or node.is_null or not node.text.strip():
        raise _unlike(node, what=what, expected="a single value")
    return node


def as_integer(node: Node, *, what: str) -> int:
    """Return the value of *node*; raise InvalidInput unless it is a whole number in decimal."""
    value = as_scalar(node, what=what)
    if _OCTAL.fullmatch(value.text):
        raise value.spot.error(f"{what} is {value.text!r}, which YAML may read as octal", hint="drop the leading zeros")
    if not _INTEGER.fullmatch(value.text):
        raise value.spot.error(
            f"{what} is {value.text!r}, not a whole number of at most 18 digits", hint="write it in digits: 1100"
        )
    return int(value.text)


def required(node: MapNode, key: str, *, what: str) -> Node:
    """Return the value of *key*; raise InvalidInput if it is missing."""
    value = node.get(key)
    if value is None:
        raise node.key_spot(key).error(f"{what} needs a value for {key!r}", hint=f"add {key}:")
    return value


def _unlike(node: Node, *, what: str, expected: str) -> Exception:
    actual = "a list" if isinstance(node, ListNode) else "a mapping"
    if isinstance(node, Scalar):
        actual = repr(node.text) if node.text.strip() and not node.is_null else "empty"
    return node.spot.error(f"{what} is {actual}, not {expected}", hint="the guide to recipes has an example of each")
