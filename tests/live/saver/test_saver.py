"""How a saver ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from layerstore.errors import StorageIO
from layerstore.live.saver.saver import Saver


def test_its_threads_end_even_where_the_store_cannot_be_read_any_more() -> None:
    """And its lock is released: the process may train on, or attach another saver."""
    ended = list[str]()

    def unreadable(_: int | None) -> None:
        raise StorageIO("cannot read the index", errno=5, filename="manifest")

    saver: Any = SimpleNamespace(
        _at_exit=lambda: None,
        _ungate=lambda: None,
        _release=unreadable,
        _place=SimpleNamespace(attempt=0),
        _background=SimpleNamespace(close=lambda *, at_once: ended.append(f"threads, {at_once=}")),
        _attempt_lock=SimpleNamespace(release=lambda: ended.append("lock")),
    )

    with pytest.raises(StorageIO, match="cannot read the index"):
        Saver._end(saver, at_once=False)

    assert ended == ["threads, at_once=False", "lock"]
