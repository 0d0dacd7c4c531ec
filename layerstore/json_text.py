"""Parse JSON that somebody else may have written, in bounded memory; every failure is a ValueError."""

import json
from collections.abc import Callable
from typing import Any

from layerstore.limits import JSON_CONTAINERS_MAX


def parse_json(data: bytes | str, *, parse_int: Callable[[str], object] | None = None) -> Any:
    """
    Return the value of *data*; *parse_int* converts the text of each integer.

    Raises:
        ValueError: *data* is not JSON, is nested too deeply, or has more lists and objects than any real file.
    """
    opened = data.count(b"[") + data.count(b"{") if isinstance(data, bytes) else data.count("[") + data.count("{")
    if opened > JSON_CONTAINERS_MAX:
        raise ValueError(f"it has more than {JSON_CONTAINERS_MAX} lists and objects")
    try:
        return json.loads(data, parse_int=parse_int)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
