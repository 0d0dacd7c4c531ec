"""Sizes and times as users write and read them."""

import re
from datetime import UTC, datetime

from layerstore.errors import InvalidInput

_SIZE = re.compile(r"\s*(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(?P<binary>i?)B?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_HINT = "write a number of bytes, or 5GB, 500MB, 2GiB"


def size_in_bytes(size: int | str) -> int:
    """
    Return *size*, a number of bytes or text with a unit, in bytes.

    >>> size_in_bytes("5GB"), size_in_bytes("1.5 MiB"), size_in_bytes(4096)
    (5000000000, 1572864, 4096)

    Raises:
        InvalidInput: *size* is not a size, or is less than a byte.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or (match["binary"] and not match["unit"]):
            raise InvalidInput(f"{size!r} is not a size", hint=_HINT)
        base = 1024 if match["binary"] else 1000
        size = int(float(match["number"]) * base ** _POWERS[match["unit"].upper()])
    if size < 1:
        raise InvalidInput("a size needs at least one byte", hint=_HINT)
    return size


def size(size_bytes: int) -> str:
    """
    Return *size_bytes* for people, in powers of 1000.

    >>> size(0), size(999), size(1234), size(999_999), size(14_000_000_000)
    ('0 B', '999 B', '1.2 kB', '1.0 MB', '14.0 GB')
    """
    if size_bytes < 1000:
        return f"{size_bytes} B"
    units = ("kB", "MB", "GB", "TB", "PB")
    # Not 1000: what would be shown as 1000.0 takes the next unit.
    power = next((power for power in range(1, len(units)) if size_bytes / 1000**power < 999.95), len(units))
    return f"{size_bytes / 1000**power:.1f} {units[power - 1]}"


def utc(time_ns: int) -> datetime:
    """
    Return *time_ns*, nanoseconds since 1970, as a time in UTC.

    >>> utc(1_500_000_000).isoformat()
    '1970-01-01T00:00:01.500000+00:00'
    """
    seconds, rest = divmod(time_ns, 10**9)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest // 1000)


SHORT_ID_DIGITS = 12
"""How many digits of an id are shown. No real step is this long, so a number with this many digits is an id."""


def short_id(id_: str) -> str:
    """
    Return the beginning of an id, as people write it.

    >>> short_id("3f0c9a1b7e52d8c4b0a1")
    '3f0c9a1b7e52'
    """
    return id_[:SHORT_ID_DIGITS]
