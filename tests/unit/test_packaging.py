"""Promises of the wheel: what ``pip install .`` puts into site-packages, and nothing beside it."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore

ROOT = Path(__file__).parents[2]
PARTS = ("layerstore", "cli", "migrations", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build the wheel from a copy of the sources, so that nothing is left in the tree and nothing is fetched."""
    source = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            # The links stay links, as in a clone.
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    out = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_only_layerstore_is_installed(wheel: zipfile.ZipFile) -> None:
    """No top-level ``cli``, ``migrations`` or ``tests`` reaches site-packages."""
    top = {name.split("/")[0] for name in wheel.namelist()}

    assert top == {"layerstore", f"layerstore-{layerstore.__version__}.dist-info"}


def test_every_source_file_is_installed(wheel: zipfile.ZipFile) -> None:
    """Each module of the library, the command line and the migrations is in the wheel, with the bytes it has here."""
    expected = {}
    for folder, prefix in (("layerstore", ""), ("cli", "layerstore/"), ("migrations", "layerstore/")):
        # rglob does not descend into the two links.
        for path in (ROOT / folder).rglob("*.py"):
            expected[prefix + path.relative_to(ROOT).as_posix()] = path.read_bytes()
    found = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}

    assert expected.keys() == found.keys()
    assert expected == found


@pytest.mark.parametrize("room", ["cli", "migrations"])
def test_mapped_folders_are_real_files(wheel: zipfile.ZipFile, room: str) -> None:
    """The wheel holds files where the repository has links."""
    members = [info for info in wheel.infolist() if info.filename.startswith(f"layerstore/{room}")]

    assert any(info.filename == f"layerstore/{room}/__init__.py" for info in members)
    assert all((info.external_attr >> 16) & 0o170000 in {0, 0o100000} for info in members)


def test_the_types_are_shipped(wheel: zipfile.ZipFile) -> None:
    """Whoever uses the library gets its types checked."""
    assert "layerstore/py.typed" in wheel.namelist()


def test_the_pieces_of_the_report_are_installed(wheel: zipfile.ZipFile) -> None:
    """The page is made of files that are no modules: they come along, with the bytes they have here."""
    folder = ROOT / "layerstore" / "inspect" / "page"
    pieces = [path for path in folder.iterdir() if path.suffix in {".html", ".css", ".js"}]

    assert len(pieces) == 3
    for path in pieces:
        assert wheel.read(f"layerstore/inspect/page/{path.name}") == path.read_bytes()


def test_the_version_is_said_once(wheel: zipfile.ZipFile) -> None:
    """The version of the wheel is the one that the library tells."""
    metadata = wheel.read(f"layerstore-{layerstore.__version__}.dist-info/METADATA").decode()

    assert f"\nVersion: {layerstore.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    """``layerstore`` on the command line is the library's own."""
    entry_points = wheel.read(f"layerstore-{layerstore.__version__}.dist-info/entry_points.txt").decode()

    assert "layerstore = layerstore.cli.entry:main" in entry_points
