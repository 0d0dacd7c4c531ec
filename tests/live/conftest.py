"""Fixtures of tests with live engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.live.forked import Nursery, nursery
from tests.live.heard import losses


@pytest.fixture(scope="session")
def ranks() -> Iterator[Nursery]:
    """Yield what starts ranks."""
    with contextlib.contextmanager(nursery)() as found:
        yield found


@pytest.fixture(scope="session")
def undisturbed(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the loss of every step of a training that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with ranks.launch("tests.live.faulty:undisturbed", {}, folder=folder, name="undisturbed") as launch:
        return losses(launch.done())
