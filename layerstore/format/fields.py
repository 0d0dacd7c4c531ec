"""
Convert between dataclasses and plain maps, field by field.

It is strict both ways: an unknown or missing field, or a value of another type, means damage or a newer format; nothing
is guessed. Types are looked up once per class, because a commit has a thousand fields, and a plan may need ten commits.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, cast

from layerstore.errors import IntegrityError
from layerstore.format import treecodec
from layerstore.format.canonical import Plain
from layerstore.model import BufferContent, FlatContent, FragmentContent, ObjectContent

Value = TypeVar("Value")
Reader = Callable[[Plain], Any]

_PLAIN = frozenset({bool, int, float, str, bytes})

# The types of a storage's content besides bytes; distinguished by their fields.
_CONTENTS: tuple[type[object], ...] = (ObjectContent, FlatContent, FragmentContent, BufferContent)


class _Misfit(Exception):
    """A value does not fit its field. Enclosing fields prefix their names; it never leaves this module."""


def to_plain(value: object) -> Plain:
    """Turn a dataclass of ``layerstore.model``, or a part of one, into a plain value whose maps are in order."""
    kind = type(value)
    if kind in _PLAIN:
        return cast(Plain, value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, StrEnum):
        return str(value)
    if dataclasses.is_dataclass(kind):
        return {
            field.name: treecodec.encode_tree(getattr(value, field.name), content_to_plain=to_plain)
            if "tree" in field.metadata
            else to_plain(getattr(value, field.name))
            for field in _fields_in_order(kind)
            if not ("omitted" in field.metadata and getattr(value, field.name) == field.default)
        }
    return cast(Plain, value)


def from_plain(cls: type[Value], value: Plain, *, what: str) -> Value:
    """Build a *cls* from the result of ``to_plain``; raises IntegrityError if *value* does not describe a *cls*."""
    try:
        return cast(Value, _reader_of(cast(Any, cls))(value))
    except _Misfit as exc:
        raise IntegrityError(f"{what}: {exc}") from exc


@cache
def _reader_of(cls: Any) -> Reader:
    """Return a function that reads a *cls*: it only checks plain fields; the others have their own readers."""
    fields = _fields(cls)
    names = frozenset(field.name for field in fields)
    may_lack = frozenset(field.name for field in fields if "omitted" in field.metadata)
    defaults = {field.name: field.default for field in fields if field.name in may_lack}
    plain = [(field.name, kind) for field in fields if (kind := _plain_type(field)) is not None]
    others = [(field.name, _field_reader(field)) for field in fields if _plain_type(field) is None]

    def read(value: Plain) -> Any:
        if type(value) is not dict:
            raise _Misfit(f"a {cls.__name__} is not a map")
        if value.keys() != names and (value.keys() | may_lack) != names:
            odd = ", ".join(sorted(names ^ value.keys()))
            raise _Misfit(f"a {cls.__name__} has unknown or missing fields: {odd}")
        made: dict[str, Any] = value.copy()
        for name, default in defaults.items():
            if made.setdefault(name, default) == default and name in value:
                raise _Misfit(f"a {cls.__name__} spells out a default")
        for name, kind in plain:
            # Not isinstance: True is not an int here.
            if type(made[name]) is not kind:
                raise _Misfit(f"{name}: {_mistyped(kind, type(made[name]))}")
        for name, read_field in others:
            try:
                made[name] = read_field(made[name])
            except _Misfit as exc:
                raise _Misfit(f"{name}: {exc}") from exc
        return cls(**made)

    return read


def _plain_type(field: "dataclasses.Field[Any]") -> type | None:
    """Return the single type of a *field* without structure, else None."""
    kind = getattr(field.type, "__supertype__", field.type)
    return kind if kind in _PLAIN else None


def _mistyped(wanted: type, found: type) -> str:
    return f"should be {wanted.__name__}, found {found.__name__}"


def _field_reader(field: "dataclasses.Field[Any]") -> Reader:
    return _read_tree if "tree" in field.metadata else _reader_for(field.type)


def _read_tree(value: Plain) -> Any:
    try:
        return treecodec.decode_tree(value, content_from_plain=_content_from_plain, what="it")
    except IntegrityError as exc:
        raise _Misfit(exc.message) from exc


def _reader_for(hint: Any) -> Reader:
    """Return a function that reads a value of the type *hint*."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return _union_reader(arguments)
    if origin is tuple:
        return _tuple_reader(arguments[0])
    if dataclasses.is_dataclass(hint):
        return _reader_of(cast(Any, hint))
    plain_type = getattr(hint, "__supertype__", hint)
    if issubclass(plain_type, StrEnum):
        return _enum_reader(plain_type)
    return _plain_reader(plain_type)


def _plain_reader(kind: type) -> Reader:
    def read(value: Plain) -> Any:
        if type(value) is not kind:
            raise _Misfit(_mistyped(kind, type(value)))
        return value

    return read


def _tuple_reader(hint: Any) -> Reader:
    kind = getattr(hint, "__supertype__", hint)
    read_list = _plain_reader(list)
    if kind in _PLAIN:
        # Long columns of numbers and names: check all their types at once.
        def read_column(value: Plain) -> Any:
            for found in set(map(type, read_list(value))) - {kind}:
                raise _Misfit(_mistyped(kind, found))
            return tuple(cast("list[Plain]", value))

        return read_column

    read_item = _reader_for(hint)
    return lambda value: tuple(map(read_item, read_list(value)))


def _enum_reader(cls: type[StrEnum]) -> Reader:
    read_text = _plain_reader(str)

    def read(value: Plain) -> Any:
        try:
            return cls(read_text(value))
        except ValueError as exc:
            raise _Misfit(f"{value!r} is not a {cls.__name__}") from exc

    return read


def _union_reader(choices: tuple[Any, ...]) -> Reader:
    """Return a function that reads one of *choices*; at most one of them is a dataclass."""
    by_type = {dict if dataclasses.is_dataclass(choice) else choice: _reader_for(choice) for choice in choices}

    def read(value: Plain) -> Any:
        read_choice = by_type.get(type(value))
        if read_choice is None:
            raise _Misfit(f"has an unexpected {type(value).__name__}")
        return read_choice(value)

    return read


def _content_from_plain(value: Plain, what: str) -> object:
    if isinstance(value, bytes):
        return value
    for recipe in _CONTENTS:
        if isinstance(value, dict) and value.keys() == {field.name for field in _fields(recipe)}:
            return from_plain(recipe, value, what=what)
    raise IntegrityError(f"{what}: a storage has no known content")


@cache
def _cached_fields(cls: Any) -> "tuple[dataclasses.Field[Any], ...]":
    return dataclasses.fields(cls)


@cache
def _fields_in_order(cls: Any) -> "list[dataclasses.Field[Any]]":
    return sorted(dataclasses.fields(cls), key=lambda field: field.name)


def _fields(cls: Any) -> "tuple[dataclasses.Field[Any], ...]":
    # The cache needs a Hashable, and mypy does not accept a class as one.
    return _cached_fields(cls)
