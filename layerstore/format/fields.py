"""
Convert between dataclasses and plain maps, field by field.

Conversion is strict both ways: an unknown or missing field, or a value of the wrong type, means damage or a newer
format; nothing is guessed. Names used as paths, and numbers used as sizes or loop counts, are checked for all callers.
Types are looked up once per class, because a commit has a thousand fields, and a plan may need ten commits.
"""

import dataclasses
import itertools
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from math import prod
from typing import Any, TypeVar, cast

from layerstore.errors import IntegrityError
from layerstore.format import treecodec
from layerstore.format.canonical import Plain
from layerstore.layers import is_inside, is_name
from layerstore.layout import OBJECT_ID
from layerstore.limits import NUMBER_MAX
from layerstore.model import STAGES, CommitId, CommitRecord, Kind, LayerVersion, ObjectId, StoredObject, StoredTensor
from layerstore.parts import PackedObject
from layerstore.states import BufferContent, FlatContent, FragmentContent, ObjectContent

Value = TypeVar("Value")
FieldReader = Callable[[Plain], Any]
FieldWriter = Callable[[Any], Plain]
Check = Callable[[Any], bool]

_PLAIN = frozenset({bool, int, float, str, bytes})

# The types that a storage's content may have besides bytes; they are distinguished by their fields.
_CONTENTS: dict[frozenset[str], type[object]] = {
    frozenset(field.name for field in dataclasses.fields(kind)): kind
    for kind in (ObjectContent, FlatContent, FragmentContent, BufferContent)
}


class _Misfit(Exception):
    """A value does not fit its field. Enclosing fields prefix their names; this never leaves the module."""


def to_plain(value: object) -> Plain:
    """Turn a dataclass of ``layerstore.model``, or one of its fields, into a plain value whose maps are in order."""
    return _writer_of(cast(Any, type(value)))(value)


@cache
def _writer_of(kind: Any) -> FieldWriter:
    """Return a function that turns a *kind* into a plain value."""
    if issubclass(kind, StrEnum):
        return str
    if issubclass(kind, tuple):
        return _plain_items
    return _fields_writer(kind) if dataclasses.is_dataclass(kind) else lambda value: value


def _plain_items(values: tuple[Any, ...]) -> list[Plain]:
    if len(kinds := set(map(type, values))) != 1:
        return list(map(to_plain, values))
    kind = kinds.pop()
    return list(values) if kind in _PLAIN else list(map(_writer_of(kind), values))


def _fields_writer(cls: Any) -> FieldWriter:
    """Return a function that writes a dataclass, copying all plain fields at once: a save has a million fields."""
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.name)
    names = tuple(field.name for field in fields)
    may_lack = [(field.name, field.default) for field in fields if "omitted" in field.metadata]
    others = [
        (field.name, _write_tree if "tree" in field.metadata else to_plain)
        for field in fields
        if _plain_type(field) is None
    ]

    def write(value: object) -> Plain:
        made: dict[str, Any] = dict(zip(names, map(getattr, itertools.repeat(value), names), strict=True))
        for name, default in may_lack:
            if made[name] == default:
                del made[name]
        for name, write_field in others:
            if name in made:
                made[name] = write_field(made[name])
        return made

    return write


def _write_tree(tree: Any) -> Plain:
    return treecodec.encode_tree(tree, content_to_plain=to_plain)


def from_plain(cls: type[Value], value: Plain, *, what: str) -> Value:
    """Build a *cls* from the result of ``to_plain``; raises IntegrityError if *value* does not describe a *cls*."""
    try:
        return cast(Value, _reader_of(cast(Any, cls))(value))
    except _Misfit as exc:
        raise IntegrityError(f"{what}: {exc}") from exc


@cache
def _reader_of(cls: Any) -> FieldReader:
    """Return a function that reads a *cls*: plain fields need only checks; other fields have their own readers."""
    fields = dataclasses.fields(cls)
    names = frozenset(field.name for field in fields)
    may_lack = frozenset(field.name for field in fields if "omitted" in field.metadata)
    defaults = {field.name: field.default for field in fields if field.name in may_lack}
    plain = [(field.name, kind, _check_of(field)) for field in fields if (kind := _plain_type(field)) is not None]
    others = [(field.name, _field_reader(field)) for field in fields if _plain_type(field) is None]
    contradiction = _CONTRADICTIONS.get(cls)

    def read(value: Plain) -> Any:
        if type(value) is not dict:
            raise _Misfit(f"a {cls.__name__} is not a map")
        if value.keys() != names and (value.keys() | may_lack) != names:
            odd = ", ".join(sorted((names ^ value.keys()) - (may_lack - value.keys())))
            raise _Misfit(f"a {cls.__name__} has unknown or missing fields: {odd}")
        made: dict[str, Any] = value.copy()
        for name, default in defaults.items():
            # Refuse a default that is spelled out: otherwise one record could be written in two ways, with two ids.
            if made.setdefault(name, default) == default and name in value:
                raise _Misfit(f"a {cls.__name__} spells out a default")
        for name, kind, check in plain:
            # Not isinstance: True is not an int here.
            if type(made[name]) is not kind:
                raise _Misfit(f"{name}: {_mistyped(kind, type(made[name]))}")
            if check is not None and not check(made[name]):
                raise _Misfit(f"{name}: {_odd(made[name])}")
        for name, read_field in others:
            if name not in value:
                continue  # it has its default
            try:
                made[name] = read_field(made[name])
            except _Misfit as exc:
                raise _Misfit(f"{name}: {exc}") from exc
        whole = cls(**made)
        problem = None if contradiction is None else contradiction(whole)
        if problem is not None:
            raise _Misfit(problem)
        return whole

    return read


# -- what values may be ----------------------------------------------------------------------------------------------


def _is_id(value: str) -> bool:
    return OBJECT_ID.fullmatch(value) is not None


_CHECKS: dict[object, Check] = {
    int: range(NUMBER_MAX + 1).__contains__,
    ObjectId: _is_id,
    CommitId: _is_id,
    "id": _is_id,
    "name": is_name,
    "path": is_inside,
}


def _check_of(field: "dataclasses.Field[Any]") -> Check | None:
    return _CHECKS.get(field.metadata.get("check", field.type))


def _odd(value: object) -> str:
    return f"it cannot be {str(value)[:60]!r}"


def _of_record(record: CommitRecord) -> str | None:
    if not record.layers:
        return "it has no layers"
    of_all_ranks = {1, record.world_size} if record.is_dcp else {record.world_size}
    if len(record.states) not in of_all_ranks or not record.states:
        return f"it has the states of {len(record.states)} ranks, and says that there were {record.world_size}"
    return None if record.stage in STAGES else f"stage: {_odd(record.stage)}"


def _of_version(version: LayerVersion) -> str | None:
    shapes = {parameter.name: parameter.shape for parameter in version.parameters}
    parameters, buffers = ({entry.name for entry in described} for described in (version.parameters, version.buffers))
    for stored in version.objects:
        for tensor in stored.tensors:
            if tensor.name not in (buffers if stored.kind is Kind.BUFFERS else parameters):
                return f"it has a slice of {tensor.name[:60]!r}, which it does not describe"
            if tensor.box and not _is_within(tensor, shapes.get(tensor.name, ())):
                return f"it has a box of {tensor.name[:60]!r} that is not within its shape"
    return None


def _is_within(tensor: StoredTensor, shape: tuple[int, ...]) -> bool:
    offsets, sizes = tensor.box[: len(shape)], tensor.box[len(shape) :]
    return (
        len(tensor.box) == 2 * len(shape)
        and prod(sizes) == tensor.elements
        and all(offset + size <= most for offset, size, most in zip(offsets, sizes, shape, strict=True))
    )


def _of_object(stored: StoredObject | PackedObject) -> str | None:
    return None if stored.shard < stored.shards else f"its shard {stored.shard}, from 0, is not one of {stored.shards}"


def _of_content(content: ObjectContent) -> str | None:
    most = content.object.size_bytes
    return None if content.size_bytes <= most else f"it is {content.size_bytes} bytes of {most}"


_CONTRADICTIONS: dict[type, Callable[[Any], str | None]] = {
    CommitRecord: _of_record,
    LayerVersion: _of_version,
    StoredObject: _of_object,
    PackedObject: _of_object,
    ObjectContent: _of_content,
}
"""For each type: the function that returns a contradiction between a value's fields, or None if they agree."""


# -- readers ---------------------------------------------------------------------------------------------------------


def _plain_type(field: "dataclasses.Field[Any]") -> type | None:
    """Return the type of *field* if it is a plain type, otherwise None."""
    kind = getattr(field.type, "__supertype__", field.type)
    return kind if kind in _PLAIN else None


def _mistyped(wanted: type, actual: type) -> str:
    return f"should be {wanted.__name__}, found {actual.__name__}"


def _field_reader(field: "dataclasses.Field[Any]") -> FieldReader:
    if "tree" not in field.metadata:
        return _reader_for(field.type)
    return _read_dict if typing.get_origin(field.type) is dict else _read_tree


def _read_tree(value: Plain) -> Any:
    try:
        return treecodec.decode_tree(value, content_from_plain=_content_from_plain, what="it")
    except IntegrityError as exc:
        raise _Misfit(exc.message) from exc


def _read_dict(value: Plain) -> Any:
    tree = _read_tree(value)
    if type(tree) is not dict:
        raise _Misfit(_mistyped(dict, type(tree)))
    return tree


def _reader_for(hint: Any) -> FieldReader:
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
    return _plain_reader(plain_type, _CHECKS.get(hint))


def _plain_reader(kind: type, check: Check | None = None) -> FieldReader:
    def read(value: Plain) -> Any:
        if type(value) is not kind:
            raise _Misfit(_mistyped(kind, type(value)))
        if check is not None and not check(value):
            raise _Misfit(_odd(value))
        return value

    return read


def _tuple_reader(hint: Any) -> FieldReader:
    kind = getattr(hint, "__supertype__", hint)
    read_list = _plain_reader(list)
    if kind in _PLAIN:
        check = _CHECKS.get(hint)

        # Long columns of numbers and names: check all their types at once.
        def read_column(value: Plain) -> Any:
            for actual in set(map(type, read_list(value))) - {kind}:
                raise _Misfit(_mistyped(kind, actual))
            column = tuple(cast("list[Plain]", value))
            if check is not None and not all(map(check, column)):
                raise _Misfit(_odd(next(itertools.filterfalse(check, column))))
            return column

        return read_column

    read_item = _reader_for(hint)
    read_alike = _alike_reader(hint) if dataclasses.is_dataclass(hint) else None

    def read_items(value: Plain) -> Any:
        rows = read_list(value)
        column = read_alike(rows) if read_alike is not None else None
        return tuple(map(read_item, rows)) if column is None else column

    return read_items


def _alike_reader(cls: Any) -> Callable[[Any], Any]:
    """
    Return a function that reads rows of plain fields column by column, since a version has thousands of tensors.

    The function returns None if the rows are wrong, or have different fields: the caller then reads them one by one.
    """
    fields = sorted(
        (field for field in dataclasses.fields(cls) if "omitted" not in field.metadata), key=lambda field: field.name
    )
    names = tuple(field.name for field in fields)
    columns = [(_plain_type(field), _check_of(field)) for field in fields]
    if cls in _CONTRADICTIONS or any(kind is None for kind, _ in columns):
        return lambda rows: None

    def read_alike(rows: list[Plain]) -> Any:
        if set(map(type, rows)) != {dict} or set(map(tuple, cast("Any", rows))) != {names}:
            return None
        values = list(map(dict.values, cast("Any", rows)))
        for (kind, check), column in zip(columns, zip(*values, strict=True), strict=True):
            if set(map(type, column)) != {kind} or (check is not None and not all(map(check, column))):
                return None
        return tuple([cls(**row) for row in cast("Any", rows)])

    return read_alike


def _enum_reader(cls: type[StrEnum]) -> FieldReader:
    read_text = _plain_reader(str)

    def read(value: Plain) -> Any:
        try:
            return cls(read_text(value))
        except ValueError as exc:
            raise _Misfit(f"{value!r} is not a {cls.__name__}") from exc

    return read


def _union_reader(choices: tuple[Any, ...]) -> FieldReader:
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
    kind = _CONTENTS.get(frozenset(value)) if isinstance(value, dict) else None
    if kind is None:
        raise IntegrityError(f"{what}: a storage has no known content")
    return from_plain(kind, value, what=what)
