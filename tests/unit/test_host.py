"""Other versions of libraries, other machines, odd paths: refused with the reason, or all the same."""

import errno
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import layerstore
from layerstore.errors import LayerstoreError, StorageIO, Unsupported
from layerstore.host import NEEDS, check_host
from tests.generated import generate

ROOT = Path(__file__).parents[2]


# -- libraries and machines ----------------------------------------------------------------------------------------


def test_the_ranges_are_those_of_the_installer() -> None:
    """What is refused here is what pip would not install."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {
        name: (least, beyond) for line in wanted for name, least, beyond in re.findall(r"^(\w+)>=(.*),<(.*)", line)
    }

    for library, (least, beyond) in NEEDS.items():
        assert pinned[library] == (".".join(map(str, least)), ".".join(map(str, beyond)))


@pytest.mark.fault(87)
def test_a_library_of_another_version_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """A real process, to which another version is told, exits with the documented code."""
    told = tmp_path / "xxhash-5.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: xxhash\nVersion: 5.0\n")
    command = [sys.executable, "-m", "layerstore.cli", "init", str(tmp_path / "store"), "--json"]
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])

    assert subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": paths}).returncode == 16
    assert not (tmp_path / "store").exists()


@pytest.mark.fault(87)
@pytest.mark.parametrize("library", NEEDS)
@pytest.mark.parametrize("version", ["0.9", "5.0rc1", "99.1.post1+local.2"])
def test_the_refusal_names_the_range(monkeypatch: pytest.MonkeyPatch, library: str, version: str) -> None:
    """What was found, what is needed, and what to type."""
    monkeypatch.setattr("layerstore.host.metadata.version", lambda name: version if name == library else _least(name))

    with pytest.raises(
        Unsupported, match=rf"^{library} is {re.escape(version)} here; layerstore needs {library}>="
    ) as caught:
        check_host.__wrapped__()
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f'pip install "{library}>=')


def _least(name: str) -> str:
    return ".".join(map(str, NEEDS[name][0]))


@pytest.mark.fault(87)
def test_a_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason: it would read every number wrong."""
    monkeypatch.setattr("sys.byteorder", "big")

    with pytest.raises(Unsupported, match="this machine is big-endian"):
        check_host.__wrapped__()


# -- odd paths -----------------------------------------------------------------------------------------------------


def test_a_store_may_have_a_long_and_odd_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of bytes, spaces, newlines and quotes in it: everything works, also from a relative path."""
    source = generate(tmp_path / "sft", layers=1, hidden=16, vocab=16)
    folder = tmp_path
    while len(os.fsencode(folder)) < 3500:
        folder /= "odd \n'\"\\ ü" + "x" * 180
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)

    with layerstore.init("store") as store:
        monkeypatch.chdir("/")
        store.ingest(source, pin="best")
        store.compose("best").write(tmp_path / "out")
        assert store.verify(read_data=True).ok
        assert store.reindex() == 1
        assert store.path == folder / "store"
    with layerstore.open(folder / "store") as store:
        assert [entry.step for entry in store.log()] == [2]


def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    """Longer than the system takes: an error with the number, and nothing that cannot be removed again."""
    folder = tmp_path
    while len(os.fsencode(folder)) < 4200:
        folder /= "x" * 200

    with pytest.raises(LayerstoreError) as caught:
        layerstore.init(folder)
    assert isinstance(caught.value, StorageIO)
    assert caught.value.errno == errno.ENAMETOOLONG
