"""
The single conversion from dataclasses to JSON: the fields of a result that ``--json`` prints.

A result whose JSON differs from its fields lists its JSON names, in order, in ``_JSON``: each is an attribute's name,
or ``name=attribute`` if the two differ, or ``name=#attribute`` for the length of the attribute. Any other dataclass has
all its fields under their own names. The JSON names are documented (docs/reference/cli.md), and programs rely on them:
attributes may be renamed, but the JSON names must not change.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path


def json_fields(result: object) -> dict[str, object]:
    """
    Return the JSON fields of the dataclass *result*, including nested ones.

    Times in nanoseconds become ISO 8601; numbers that JSON lacks (NaN and the infinities) become null.
    """
    assert is_dataclass(result), f"{type(result).__name__} is not a dataclass"
    names: str = getattr(result, "_JSON", None) or " ".join(field.name for field in fields(result))
    pairs = (pair.partition("=") for pair in names.split())
    return {name: _plain(result, attribute or name) for name, _, attribute in pairs}


def _plain(owner: object, attribute: str) -> object:
    value = attrgetter(attribute.removeprefix("#"))(owner)
    if attribute.startswith("#"):
        return len(value)
    return iso_time(value) if attribute.endswith("_ns") else json_value(value)


def json_value(value: object) -> object:
    """
    Return *value* in JSON's types: mappings, lists, texts, numbers and null.

    >>> json_value({"steps": (1, float("nan")), "at": Path("/store")})
    {'steps': [1, None], 'at': '/store'}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [json_value(item) for item in value]
    return json_fields(value)


def iso_time(time_ns: int) -> str:
    """
    Return *time_ns* as ISO 8601, for programs.

    >>> iso_time(1_500_000)
    '1970-01-01T00:00:00.001500Z'
    """
    seconds, rest = divmod(time_ns, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"


def short_time(time_ns: int) -> str:
    """
    Return *time_ns* as ISO 8601 without the fraction of its second.

    >>> short_time(1_500_000)
    '1970-01-01T00:00:00Z'
    """
    return iso_time(time_ns).partition(".")[0] + "Z"
