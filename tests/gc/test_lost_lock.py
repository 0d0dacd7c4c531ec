"""
A collection may lose its lock, or find itself where locks do not reach other hosts: it stops as soon as it looks.

Until then two run at once, and looking again decides.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import Locked
from tests.gc.test_gc import collect, grow_old, masters, steps
from tests.unit.checkpoints import Checkpoints

SUSPENDED = """
import json, os, signal, sys
import layerstore
from layerstore import Keep, Store
stopped = []
def hook(operation, path):
    if operation == "unlink" and "commits" in path.parts and not stopped:
        stopped.append(path)
        os.kill(os.getpid(), signal.SIGSTOP)
with Store(sys.argv[1], hook=hook) as store:
    try:
        store.gc(Keep(last=1), grace_seconds=0)
        print(json.dumps("done"))
    except layerstore.LayerstoreError as exc:
        print(json.dumps([exc.exit_code, str(exc)]))
"""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return such a store, to be copied."""
    folder = tmp_path_factory.mktemp("pristine")
    saved = Checkpoints(folder)
    with layerstore.init(folder / "store") as made:
        for step in (10, 20, 30):
            made.ingest(saved(step), run="r")
        made.ingest(saved(15), run="gone")
        made.drop("gone@15")
    return folder / "store"


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Iterator[Store]:
    """Return a store with three commits, of which two may go, and something that nothing needs."""
    shutil.copytree(pristine, tmp_path / "store")
    with Store(tmp_path / "store") as opened:
        grow_old(opened)
        yield opened


def free(store: Store) -> None:
    """Let another collection in, as if the first one's lock did not reach it."""
    (store.path / "locks" / "gc.lock").unlink()


def tree(store: Store) -> set[str]:
    """Return the paths of all files but locks, the index and what nothing names."""
    found = (path.relative_to(store.path) for path in store.path.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] not in {"locks", "manifest", "tmp"}}


class LosingIt:
    """A progress that loses the lock while a collection marks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def start(self, what: str, total: int) -> None:
        """Lose the lock."""
        if what == "records":
            free(self._store)

    def advance(self, amount: int) -> None:
        """Do nothing."""


@pytest.mark.fault(107)
def test_a_lock_lost_while_marking_ends_the_collection(store: Store) -> None:
    """Nothing was removed."""
    before = tree(store)

    with pytest.raises(Locked, match="the lock of the collection was lost to another process"):
        collect(store, Keep(last=1), progress=LosingIt(store))

    assert tree(store) == before
    assert steps(store, "r") == [30, 20, 10]


@pytest.mark.fault(54, 107)
def test_a_suspended_collection_gives_way(store: Store) -> None:
    """A process that slept while its lock was lost finds another collection done, and touches nothing."""
    kept = masters(store, "r@30")
    command = [sys.executable, "-c", SUSPENDED, str(store.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            while not os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]):
                pass
            free(store)
            done = collect(store, Keep(last=1), grace_seconds=None)
            after = tree(store)
            process.send_signal(signal.SIGCONT)
            told, _ = process.communicate(timeout=60)
        finally:
            process.kill()

    code, message = json.loads(told)
    assert len(done.removed) > 0
    assert code == Locked.exit_code
    assert f"lost to pid {os.getpid()} on " in message
    assert tree(store) == after
    assert masters(store, "r@30") == kept
    assert store.verify(read_data=True).ok


USUAL = [("unlink", 1), ("rename", 3), ("fsync", 2)]
MORE = [("unlink", 2), ("unlink", 9), ("rename", 1), ("rename", 7), ("fsync", 1), ("fsync", 3)]


@pytest.mark.fault(107)
@pytest.mark.filterwarnings("ignore:.*no longer there:layerstore.storage.IndexNotice")
@pytest.mark.parametrize(
    ("operation", "ordinal"), [*USUAL, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE)]
)
def test_two_collections_at_once_harm_nothing(store: Store, operation: str, ordinal: int) -> None:
    """The lock is lost once records are being removed: a whole collection runs in the middle of another."""
    kept = masters(store, "r@30")
    calls: list[str] = []

    def hook(doing: str, path: Path) -> None:
        if calls or (doing == "unlink" and "commits" in path.parts):
            calls.append(doing)
        if doing == operation and calls.count(operation) == ordinal:
            calls.append("")
            free(store)
            with Store(store.path) as other:
                collect(other, Keep(last=1))

    with Store(store.path, hook=hook) as collecting, contextlib.suppress(Locked):
        collect(collecting, Keep(last=1))

    assert calls.count(operation) >= ordinal
    assert steps(store, "r") == [30]
    assert masters(store, "r@30") == kept
    assert store.verify(read_data=True).ok
    collect(store)
    assert store.verify().orphans == 0
    assert list((store.path / "gc" / "aside").iterdir()) == []
