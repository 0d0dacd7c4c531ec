"""Sizes as users write them."""

import re

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
        InvalidInput: It is not a size, or less than a byte.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or (match["binary"] and not match["unit"]):
            raise InvalidInput(f"{size!r} is no size", hint=_HINT)
        base = 1024 if match["binary"] else 1000
        size = int(float(match["number"]) * base ** _POWERS[match["unit"].upper()])
    if size < 1:
        raise InvalidInput("a size needs at least one byte", hint=_HINT)
    return size
