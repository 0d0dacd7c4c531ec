"""What tests of composing share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with layerstore.init(tmp_path / "store") as made:
        yield made
