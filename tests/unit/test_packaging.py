"""Promises of the packages: what ``pip install .`` puts into site-packages, and nothing beside it."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore

ROOT = Path(__file__).parents[2]
PARTS = ("layerstore", "cli", "migrations", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources, so that nothing is left in the tree."""
    source = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            # The links stay links, as in a clone.
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, source / part)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """Build the wheel; nothing is fetched."""
    with zipfile.ZipFile(pip_wheel(source, tmp_path_factory.mktemp("wheel"))) as opened:
        yield opened


def pip_wheel(source: Path, out: Path) -> Path:
    """Return the wheel that pip builds of *source* in *out*."""
    built = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def built_by_setuptools(what: str, source: Path, out: Path) -> Path:
    """Return what the hook ``build_*what*`` of setuptools makes of *source* in *out*."""
    code = f"import sys; from setuptools.build_meta import build_{what} as build; build(sys.argv[1])"
    built = subprocess.run([sys.executable, "-c", code, out], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.iterdir()
    return path


def test_only_layerstore_is_installed(wheel: zipfile.ZipFile) -> None:
    """No top-level ``cli``, ``migrations`` or ``tests`` reaches site-packages."""
    top = {name.split("/")[0] for name in wheel.namelist()}

    assert top == {"layerstore", f"layerstore-{layerstore.__version__}.dist-info"}


def test_every_source_file_is_installed(wheel: zipfile.ZipFile) -> None:
    """Modules, types and the pieces of the report are in the wheel with the bytes they have here, and as real files."""
    expected = {"layerstore/py.typed": b""}
    for folder, prefix in (("layerstore", ""), ("cli", "layerstore/"), ("migrations", "layerstore/")):
        # rglob does not descend into the two links.
        for path in (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".html", ".css", ".js"}):
            expected[prefix + path.relative_to(ROOT).as_posix()] = path.read_bytes()
    members = {info.filename: info for info in wheel.infolist() if ".dist-info/" not in info.filename}

    assert {f"layerstore/inspect/page/page.{kind}" for kind in ("html", "css", "js")} <= expected.keys()
    assert {name: wheel.read(name) for name in members} == expected
    assert {(info.external_attr >> 16) & 0o170000 for info in members.values()} <= {0, 0o100000}


def test_version_and_command_are_the_librarys_own(wheel: zipfile.ZipFile) -> None:
    """What the wheel says of itself is what the library tells."""
    info = f"layerstore-{layerstore.__version__}.dist-info"
    metadata, entry_points = (wheel.read(f"{info}/{name}").decode() for name in ("METADATA", "entry_points.txt"))

    assert f"\nVersion: {layerstore.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "layerstore = layerstore.cli.entry:main" in entry_points


def test_a_login_node_needs_neither_torch_nor_deepspeed(wheel: zipfile.ZipFile) -> None:
    """They come with the extras that train."""
    [metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    wanted = re.findall(r"^Requires-Dist: (\w+)(.*)$", wheel.read(metadata).decode(), flags=re.M)

    always = {name for name, rest in wanted if "extra ==" not in rest}
    trained = {name for name, rest in wanted if "extra == 'train'" in rest or 'extra == "train"' in rest}
    assert {"numpy", "lmdb"} <= always
    assert not {"torch", "deepspeed"} & always
    assert trained == {"torch", "deepspeed"}


def test_an_editable_install_is_a_path_for_type_checkers_too(source: Path, tmp_path: Path) -> None:
    """``pip install -e .`` leaves a ``.pth`` file: type checkers and editors read those, and cannot run a finder."""
    with zipfile.ZipFile(built_by_setuptools("editable", source, tmp_path)) as editable:
        left = [name for name in editable.namelist() if ".dist-info/" not in name]
        lines = [editable.read(name).decode().strip() for name in left]

    assert [Path(name).suffix for name in left] == [".pth"]
    assert [Path(line).resolve() for line in lines] == [source.resolve()]


def test_the_source_distribution_builds_the_same_wheel(source: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """It holds real files where a clone has links."""
    (packed, unpacked, built) = (tmp_path / name for name in ("packed", "unpacked", "built"))
    packed.mkdir()
    with tarfile.open(built_by_setuptools("sdist", source, packed)) as archive:
        assert not [member.name for member in archive if member.issym()]
        archive.extractall(unpacked)
    (top,) = unpacked.iterdir()

    with zipfile.ZipFile(pip_wheel(top, built)) as again:
        assert {name: again.read(name) for name in again.namelist()} == {
            name: wheel.read(name) for name in wheel.namelist()
        }


def test_a_release_is_built_by_one_command(source: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """The checklist's ``python -m build`` makes both files, and the wheel is the one that pip makes."""
    pytest.importorskip("build")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "-o", tmp_path, source], check=True)
    named = f"layerstore-{layerstore.__version__}"

    assert {path.name for path in tmp_path.iterdir()} == {f"{named}.tar.gz", f"{named}-py3-none-any.whl"}
    with zipfile.ZipFile(tmp_path / f"{named}-py3-none-any.whl") as built:
        assert {name: built.read(name) for name in built.namelist()} == {
            name: wheel.read(name) for name in wheel.namelist()
        }
