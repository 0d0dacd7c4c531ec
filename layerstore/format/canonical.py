"""
One value, one sequence of bytes: msgpack in canonical form. Only this module uses msgpack.

Map keys are strings in sorted order; there are no extension types. Reading re-encodes and compares, so a second
encoding of a value is never accepted.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeAlias, Union

import msgpack

from layerstore.errors import IntegrityError, InvalidInput
from layerstore.limits import BLOB_CONTAINERS_MAX

Plain: TypeAlias = Union[bool, int, float, str, bytes, "list[Plain]", "dict[str, Plain]", None]


def pack(value: Plain) -> bytes:
    """
    Encode *value*.

    >>> pack({"b": 1, "a": [None]}) == pack({"a": [None], "b": 1})
    True

    Raises:
        InvalidInput: *value* holds something that msgpack cannot express: invalid Unicode, an integer beyond 64 bits.
    """
    try:
        in_order = _sorted(value)
    except (TypeError, RecursionError) as exc:
        raise InvalidInput(f"a value cannot be recorded: {exc}") from exc
    return pack_in_order(in_order)


def pack_in_order(value: Plain) -> bytes:
    """Encode *value*, whose maps are already in order: like ``pack``, but faster."""
    try:
        data: bytes = msgpack.packb(value, use_bin_type=True, strict_types=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise InvalidInput(f"a value cannot be recorded: {exc}") from exc
    return data


def pack_map(values: Mapping[str, bytes]) -> bytes:
    """
    Encode a map of *values* that are encoded already.

    >>> pack_map({"b": pack(1), "a": pack([None])}) == pack({"a": [None], "b": 1})
    True
    """
    packer = msgpack.Packer()
    entries = (part for key in sorted(values) for part in (packer.pack(key), values[key]))
    return b"".join((packer.pack_map_header(len(values)), *entries))


def pack_list(values: Sequence[bytes]) -> bytes:
    """Encode a list of *values* that are encoded already."""
    return b"".join((msgpack.Packer().pack_array_header(len(values)), *values))


def unpack(data: bytes, *, what: str, containers_max: int = BLOB_CONTAINERS_MAX, is_canonical: bool = False) -> Plain:
    """
    Decode *data*, which errors call *what*.

    *is_canonical* skips checking the form, which takes most of the time; pass it only for *data* that this
    library wrote.

    Raises:
        IntegrityError: *data* is not a canonical encoding, or has more than *containers_max* maps and lists.
    """
    as_map = None if is_canonical else _map_in_order
    value = _decode(data, what, as_map=as_map, containers_max=containers_max)
    if is_canonical:
        return value
    with _readable(what):  # nested too deeply, for example
        again = pack_in_order(value)
    if again != data:
        raise IntegrityError(f"{what} is not in canonical form")
    return value


_AsMap: TypeAlias = Callable[[list[tuple[str, Plain]]], dict[str, Plain]]

# The bytes that begin a list or a map: fixarray and fixmap, array 16 and 32, map 16 and 32.
_BEGIN = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])


def check_containers(data: bytes, *, what: str, containers_max: int = BLOB_CONTAINERS_MAX) -> None:
    """Raise IntegrityError if *data* has more than *containers_max* maps and lists; builds none of them."""
    # An upper bound, as these bytes also occur inside texts and numbers; it is low enough for nearly all data.
    if len(data) - len(data.translate(None, _BEGIN)) <= containers_max:
        return
    counter = _counting(containers_max)
    next(counter)
    with _readable(what):
        msgpack.unpackb(data, object_pairs_hook=counter.send, list_hook=counter.send, **_bounds(data))


def _counting(containers_max: int) -> Generator[None, object]:
    """Count the values sent; raise ValueError if there are too many."""
    for _ in range(containers_max + 1):
        yield
    raise ValueError(f"it has more than {containers_max} maps and lists")


def _decode(data: bytes, what: str, *, as_map: _AsMap | None, containers_max: int) -> Plain:
    with _readable(what):
        # Skim the data first: unpacking allocates as many elements as a list claims, before it reads any of them.
        reader = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        reader.feed(data)
        reader.skip()
    check_containers(data, what=what, containers_max=containers_max)
    with _readable(what):
        value: Plain = msgpack.unpackb(data, object_pairs_hook=as_map, **_bounds(data))
    return value


def _bounds(data: bytes) -> dict[str, Any]:
    return {
        "raw": False,
        "strict_map_key": True,
        "max_str_len": len(data),
        "max_bin_len": len(data),
        "max_array_len": len(data),
        "max_map_len": len(data),
        "max_ext_len": 0,
        "ext_hook": _refuse_extension,
    }


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as exc:
        raise IntegrityError(f"{what} is not readable: {exc or type(exc).__name__}") from exc


def _refuse_extension(code: int, data: bytes) -> Plain:
    # A maximum length of 0 still lets empty extensions through.
    raise ValueError(f"it holds the extension type {code}")


def _map_in_order(pairs: list[tuple[str, Plain]]) -> dict[str, Plain]:
    mapping = dict(pairs)
    # Re-encoding reveals a duplicate key.
    if not _are_texts_in_order(tuple(mapping)):
        raise ValueError("a map's keys are not text in sorted order")
    return mapping


@lru_cache(maxsize=1024)
def _are_texts_in_order(keys: tuple[object, ...]) -> bool:
    """Whether *keys* are sorted texts; cached, as a record's hundreds of maps have only four sets of keys."""
    texts = [key for key in keys if type(key) is str]
    return len(texts) == len(keys) and texts == sorted(texts)


def _sorted(value: Plain) -> Plain:
    if isinstance(value, dict):
        if any(type(key) is not str for key in value):
            raise TypeError("a map has a key that is not text")
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
