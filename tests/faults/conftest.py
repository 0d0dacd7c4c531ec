"""Where faults happen: in memory, because a killed process leaves the same behind there, and sooner."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from tests.environment import memory
from tests.faults.verbs import make_scene


@pytest.fixture
def fast_path() -> Iterator[Path]:
    """Yield a private folder, in memory where there is such a place."""
    with _private_folder() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def fast_module_path() -> Iterator[Path]:
    """Yield one such folder for all tests of a module."""
    with _private_folder() as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def scene() -> Iterator[Path]:
    """Yield the stores and checkpoints that verbs begin at; they are copied, never changed."""
    with _private_folder() as folder:
        yield make_scene(Path(folder) / "scene")


@pytest.fixture
def folder(pristine: Path, fast_path: Path) -> Path:
    """Return a copy of what a module's ``pristine`` has made once, to be harmed."""
    return Path(shutil.copytree(pristine, fast_path / "all"))


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """Return the store in that copy."""
    with layerstore.open(folder / "store") as opened:
        yield opened


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="layerstore-faults-", dir=memory())


@pytest.fixture(scope="session")
def strace() -> None:
    """Skip where strace is missing or may not trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(["strace", "-o", os.devnull, "true"], check=False, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.strip()}")
