"""
Dataclasses to plain maps and back, by their fields.

Strict both ways: an unknown or missing field, or a value of another type, is damage or a newer format,
never something to guess about.
"""

import dataclasses
import types
import typing
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar, cast

from layerstore.errors import IntegrityError
from layerstore.format import treecodec
from layerstore.format.canonical import Plain
from layerstore.model import BufferContent, FlatContent, FragmentContent, ObjectContent

Value = TypeVar("Value")

# What a storage's content may be, besides bytes; told apart by their fields.
_CONTENTS: tuple[type[object], ...] = (ObjectContent, FlatContent, FragmentContent, BufferContent)


def to_plain(value: object) -> Plain:
    """Turn a dataclass of ``layerstore.model``, or a part of one, into what ``canonical.pack`` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _field_to_plain(field, value) for field in _fields(type(value))}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return cast(Plain, value)


def _field_to_plain(field: "dataclasses.Field[Any]", owner: object) -> Plain:
    value = getattr(owner, field.name)
    return treecodec.encode(value, content_to_plain=to_plain) if "tree" in field.metadata else to_plain(value)


def from_plain(cls: type[Value], value: Plain, *, what: str) -> Value:
    """
    Build a *cls* from what ``to_plain`` gave.

    Raises:
        IntegrityError: *value* is not the image of a *cls*.
    """
    if not isinstance(value, dict):
        raise IntegrityError(f"{what}: a {cls.__name__} is not a map")
    fields = _fields(cls)
    odd = {field.name for field in fields} ^ value.keys()
    if odd:
        raise IntegrityError(f"{what}: a {cls.__name__} has unknown or missing fields: {', '.join(sorted(odd))}")
    return cls(**{field.name: _field_from_plain(field, value[field.name], what) for field in fields})


def _field_from_plain(field: "dataclasses.Field[Any]", value: Plain, what: str) -> Any:
    what = f"{what}: {field.name}"
    if "tree" in field.metadata:
        return treecodec.decode(value, content_from_plain=_content_from_plain, what=what)
    return _from_plain(field.type, value, what)


def _from_plain(hint: Any, value: Plain, what: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return _from_plain(_chosen(arguments, value, what), value, what)
    if origin is tuple:
        items = _checked(list, value, what)
        return tuple(_from_plain(arguments[0], item, what) for item in items)
    if dataclasses.is_dataclass(hint):
        return from_plain(cast(type[object], hint), value, what=what)
    plain_type = getattr(hint, "__supertype__", hint)
    if issubclass(plain_type, StrEnum):
        return _enum_from_plain(plain_type, _checked(str, value, what), what)
    return _checked(plain_type, value, what)


def _checked(cls: type[Value], value: Plain, what: str) -> Value:
    # Not isinstance: True is no int here.
    if type(value) is not cls:
        raise IntegrityError(f"{what} should be {cls.__name__}, found {type(value).__name__}")
    return value


def _enum_from_plain(cls: type[StrEnum], value: str, what: str) -> StrEnum:
    try:
        return cls(value)
    except ValueError as exc:
        raise IntegrityError(f"{what}: {value!r} is not a {cls.__name__}") from exc


def _chosen(choices: tuple[Any, ...], value: Plain, what: str) -> Any:
    """Return the one of *choices* that *value* can be: at most one of a union's members is a dataclass."""
    for choice in choices:
        if isinstance(value, dict) if dataclasses.is_dataclass(choice) else type(value) is choice:
            return choice
    raise IntegrityError(f"{what} has an unexpected {type(value).__name__}")


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


def _fields(cls: Any) -> "tuple[dataclasses.Field[Any], ...]":
    # The cache wants a Hashable, which mypy does not see in a class.
    return _cached_fields(cls)
