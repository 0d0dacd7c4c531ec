"""
The disk refuses to give back what was written: what cannot be read is named, and everything else goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore.disk import Files, OpenFile
from layerstore.errors import IntegrityError, StorageIO
from layerstore.store import Store, init
from tests.faults.harness import composed, copied, problems, tiny_checkpoint, traced

_DRIVER = """
import sys
from layerstore.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def sound(fast_module_path: Path) -> Path:
    """Return a store with two commits of two runs, to copy."""
    with init(fast_module_path / "store") as store:
        for run, step in (("one", 2), ("two", 4)):
            store.ingest(tiny_checkpoint(fast_module_path / run, step=step), run=run)
    return fast_module_path / "store"


def refused(path: Path, *words: object) -> tuple[int, str]:
    """Run the command line while *path* cannot be read; return its exit code and all that it said."""
    options = ["-P", str(path), "-e", "inject=preadv,preadv2:error=EIO"]
    done = traced(options, _DRIVER, *words)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.fault(22)
@pytest.mark.full
@pytest.mark.usefixtures("strace")
def test_an_object_that_cannot_be_read_is_named_with_who_needs_it(sound: Path, fast_path: Path) -> None:
    """Whoever asks for it is told its file; other commits compose; verify goes on and lists it."""
    path = copied(sound, fast_path / "store")
    with Store(path) as store:
        version = store.repo.version(store.compose("one").composition.layers[0].version)
    file = store.repo.layout.object(version.objects[0].id)

    code, said = refused(file, "compose", "one@2", "-o", fast_path / "out", "--store", path)
    assert (code, str(file) in said, "Input/output error" in said) == (1, True, True)
    assert not (fast_path / "out").exists()

    code, said = refused(file, "verify", "--read-data", "--json", "--store", path)
    (damage,) = json.loads(said.splitlines()[0])["damaged"]
    assert (code, damage["id"], damage["needed_by"]) == (20, file.name, ["one@2"])
    assert "Input/output error" in damage["reason"]

    assert refused(file, "compose", "two@4", "-o", fast_path / "other", "--store", path)[0] == 0
    assert problems(path, fast_path, {}) == []


@pytest.mark.fault(22)
@pytest.mark.full
@pytest.mark.usefixtures("strace")
def test_a_record_that_cannot_be_read_is_named_and_hides_no_other(sound: Path, fast_path: Path) -> None:
    """It is shown as damaged, the other run answers, and nothing is collected meanwhile."""
    path = copied(sound, fast_path / "store")
    (file,) = (path / "commits" / "one").iterdir()

    code, said = refused(file, "verify", "--json", "--store", path)
    damaged = json.loads(said.splitlines()[0])["damaged"]
    assert (code, [damage["needed_by"] for damage in damaged]) == (20, [["one@2"]])
    assert "Input/output error" in damaged[0]["reason"]

    code, said = refused(file, "compose", "one@2", "-o", fast_path / "out", "--store", path)
    assert (code, str(file) in said) == (1, True)
    assert refused(file, "compose", "two@4", "-o", fast_path / "other", "--store", path)[0] == 0

    before = sorted((path / "objects").rglob("*"))
    code, said = refused(file, "gc", "--keep-last", "1", "--yes", "--store", path)
    assert code == 1, said
    assert sorted((path / "objects").rglob("*")) == before
    assert problems(path, fast_path, {}) == []


@pytest.mark.fault(22, 95)
@pytest.mark.full
@pytest.mark.usefixtures("strace")
def test_a_folder_that_cannot_be_listed_is_never_an_empty_one(sound: Path, fast_path: Path) -> None:
    """Neither the folder of all runs nor one run's."""
    path = copied(sound, fast_path / "store")
    for folder in (path / "commits", path / "commits" / "one"):
        done = traced(["-P", str(folder), "-e", "inject=getdents64:error=EIO"], _DRIVER, "log", "--store", path)

        assert done.returncode == 1, done.stdout
        assert str(folder) in done.stderr
        assert "Input/output error" in done.stderr


# -- a view that is late -------------------------------------------------------------------------------------------


class LateFiles(Files):
    """A node whose view of some folders is old: names that others have made lately are not listed yet, nor there."""

    def __init__(self, hidden: Callable[[Path], bool]) -> None:
        """Hide the paths for which *hidden* is true."""
        super().__init__()
        self._hidden = hidden
        self.looks = 0

    def look(self, path: Path) -> os.stat_result | None:
        """Look at what is seen already."""
        if self._hidden(path):
            self.looks += 1
            return None
        return super().look(path)

    def names_unsorted(self, directory: Path) -> list[str]:
        """List what is seen already."""
        return [name for name in super().names_unsorted(directory) if not self._hidden(directory / name)]

    def open(self, path: Path) -> OpenFile:
        """Open what is seen already."""
        if self._hidden(path):
            self.looks += 1
            raise StorageIO(f"cannot open {path}: made up", errno=2, filename=str(path))
        return super().open(path)


def _late(path: Path, hidden: Callable[[Path], bool]) -> tuple[Store, LateFiles]:
    """Open the store at *path* on a node that does not see everything yet."""
    late, store = LateFiles(hidden), Store(path)
    for room in (store.repo, store.repo.objects, store.repo.records, store.repo.aside):
        name = "files" if hasattr(room, "files") else "_files"
        object.__setattr__(room, name, late)
    return store, late


@pytest.mark.filterwarnings("ignore:.*no longer there:layerstore.storage.IndexNotice")
@pytest.mark.fault(106)
def test_a_late_node_sees_fewer_commits_and_never_a_part(sound: Path, fast_path: Path) -> None:
    """A commit whose record it does not see is not there; one that it sees composes as everywhere."""
    path = copied(sound, fast_path / "store")
    with Store(path) as store:
        expected = composed(store, "one@2", fast_path)
    store, _ = _late(path, lambda at: at.is_relative_to(path / "commits" / "two"))
    with store:
        assert [(entry.run, entry.step) for entry in store.log("one")] == [("one", 2)]
        assert composed(store, "one@2", fast_path) == expected


@pytest.mark.fault(106)
def test_what_a_late_node_misses_is_looked_for_again(sound: Path, fast_path: Path) -> None:
    """An object that is not seen at first is found at a later look of the same command, or told as missing."""
    path = copied(sound, fast_path / "store")
    with Store(path) as store:
        expected = composed(store, "one@2", fast_path)
    files = [file for file in (path / "objects").rglob("*") if file.is_file()]
    seen: set[Path] = set()

    def hidden_once(at: Path) -> bool:
        is_new = at in files and at not in seen
        seen.add(at)
        return is_new

    store, late = _late(path, hidden_once)
    with store:
        assert composed(store, "one@2", fast_path) == expected
    assert late.looks > 5

    store, _ = _late(path, lambda at: at in files)
    with store, pytest.raises(IntegrityError, match="is missing"):
        store.compose("one@2").write(fast_path / "out")
    assert not (fast_path / "out").exists()
