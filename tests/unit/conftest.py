"""An empty store and what makes checkpoints, for tests that save a few steps and look what becomes of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from tests.unit.checkpoints import Checkpoints


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with nothing in it."""
    with layerstore.init(tmp_path / "store") as made:
        yield made


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints."""
    return Checkpoints(tmp_path)
