"""What the tests of the documentation share: a furnished scene, on a disk."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.scene import furnish


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """Yield a folder that is not in memory, where ``doctor`` would find that nothing can be promised."""
    with tempfile.TemporaryDirectory(prefix="layerstore-docs-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def furnished(disk: Path) -> Path:
    """Return a scene, to be copied by links."""
    root = disk / "furnished"
    root.mkdir()
    furnish(root)
    return root


@pytest.fixture(autouse=True)
def _own_cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep mirrors apart from the user's own."""
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(disk / "cache"))


@pytest.fixture
def disk_path(disk: Path) -> Path:
    """Return a new folder beside the scene."""
    return Path(tempfile.mkdtemp(dir=disk))
