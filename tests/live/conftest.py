"""Fixtures of tests with live engines."""

from __future__ import annotations

import pytest

from tests.forked import Nursery, nursery
from tests.live.launched import losses
from tests.remote.conftest import s3, s3_server  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def ranks() -> Nursery:
    """Return what starts ranks."""
    return nursery()


@pytest.fixture(scope="session")
def undisturbed(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Return the loss of every step of a training that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with ranks.launch("tests.live.faulty:undisturbed", {}, folder=folder, name="undisturbed") as launch:
        return losses(launch.done())
