"""Fixtures of tests with live engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.live.forked import Nursery, nursery


@pytest.fixture(scope="session")
def ranks() -> Iterator[Nursery]:
    """Yield what starts ranks."""
    with contextlib.contextmanager(nursery)() as found:
        yield found
