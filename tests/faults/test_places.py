"""Stores on a network, by a list of mounts that is made up, and without an index."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.storage import IndexNotice, files, locks, manifest_directory
from tests.faults.harness import composed, in_child, tiny_checkpoint

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def sources(fast_module_path: Path) -> Path:
    """Return a folder with two checkpoints."""
    for step in (2, 4):
        tiny_checkpoint(fast_module_path / f"step{step}", step=step)
    return fast_module_path


def use_all(path: Path, sources: Path, scratch: Path) -> dict[str, object]:
    """Use every verb on the store at *path*; return what they answer."""
    with Store(path) as store:
        ingested = [store.ingest(sources / f"step{step}", run="run").step for step in (2, 4)]
        store.pin("kept", "run@2")
        answers: dict[str, object] = {
            "ingested": ingested,
            "runs": store.runs,
            "log": [(entry.step, entry.commit) for entry in store.log()],
            "ls": len(store.ls("run@4")),
            "composed": composed(store, "run@4", scratch),
            "pins": [pin.name for pin in store.pins()],
            "diff": len(store.diff("run@2", "run@4").layers),
            "stats": store.stats().commits,
            "removed": [fate.step for fate in store.gc(Keep(last=1), grace_seconds=0).removed],
            "verify": store.verify(read_data=True).ok,
        }
        store.drop("run@2")
        answers["left"] = [entry.step for entry in store.log()]
        return answers


@pytest.fixture(scope="module")
def expected(sources: Path) -> dict[str, object]:
    """Return what every verb answers in a place without faults."""
    layerstore.init(sources / "plain").close()
    return use_all(sources / "plain", sources, sources)


# -- on a network --------------------------------------------------------------------------------------------------


@pytest.fixture
def network(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that the system calls NFS."""
    folder = fast_path / "nfs"
    folder.mkdir()
    listing = fast_path / "mountinfo"
    listing.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n33 22 0:42 / {folder} rw - nfs4 server:/ rw\n")
    monkeypatch.setattr(files, "_MOUNTS", listing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(fast_path / "cache"))
    return folder


def test_every_verb_works_on_a_network_filesystem(
    network: Path, sources: Path, fast_path: Path, expected: dict[str, object]
) -> None:
    """The index goes to a folder of this node by itself, and the answers are those of a local store."""
    with layerstore.init(network / "store") as store:
        store_id = store.id

    assert use_all(network / "store", sources, fast_path) == expected
    [index] = (fast_path / "cache" / "layerstore" / "manifests").iterdir()
    assert index.name.startswith(store_id)
    assert (index / "data.mdb").is_file()
    assert not (network / "store" / "manifest").exists()
    assert {path.name for path in (network / "store" / "locks").iterdir()} >= {"gc.lock", "run-run.lock", "gc.lock.1"}


def test_two_stores_may_be_given_one_folder_for_the_index(
    sources: Path, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own below it, by its id; exchanged, neither is believed."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(fast_path / "index"))
    indexes = []
    for name, step in (("a", 2), ("b", 4)):
        with layerstore.init(fast_path / name) as store:
            store.ingest(sources / f"step{step}", run="run")
            indexes.append(manifest_directory(store.repo.layout, store_id=store.id))
    first, second = indexes
    assert {path.parent for path in indexes} == {fast_path / "index"}
    first.rename(fast_path / "aside")
    second.rename(first)
    (fast_path / "aside").rename(second)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {}
        for name in ("a", "b"):
            with Store(fast_path / name) as store:
                found[name] = [entry.step for entry in store.log()]

    assert found == {"a": [2], "b": [4]}
    assert [notice.category for notice in caught] == [IndexNotice, IndexNotice]


# -- without an index ----------------------------------------------------------------------------------------------


def _without(variable: str, value: str, path: Path, sources: Path, scratch: Path) -> dict[str, object]:
    layerstore.init(path).close()
    os.environ[variable] = value
    return use_all(path, sources, scratch)


@pytest.mark.fault(100)
@pytest.mark.parametrize(
    ("variable", "value", "notices"),
    [("LAYERSTORE_MANIFEST_DIR", "/proc/nowhere", {"IndexNotice"}), ("LAYERSTORE_NO_INDEX", "1", set())],
)
def test_every_verb_works_without_an_index(
    sources: Path, fast_path: Path, expected: dict[str, object], variable: str, value: str, notices: set[str]
) -> None:
    """It cannot be made, or is not wanted: the same answers, with a notice unless that was asked for."""
    outcome = in_child(_without, variable, value, fast_path / "store", sources, fast_path)

    assert outcome.needed() == expected
    assert not (fast_path / "store" / "manifest" / "data.mdb").exists()
    assert {notice.split(":")[0] for notice in outcome.notices} == notices


# -- jobs on a network ---------------------------------------------------------------------------------------------


def test_a_job_that_died_is_followed_on_a_network_too(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has yet to run out: whoever is started next waits for that, and gets the very attempt."""
    monkeypatch.setattr(locks, "LEASE_SECONDS", 0.5)
    monkeypatch.setattr(locks, "LEASE_RENEWED_SECONDS", 60.0)  # what a dead holder does not do
    layerstore.init(network / "store").close()
    with Store(network / "store") as dead, Store(network / "store") as store:
        held = dead.repo.lock_attempt("run", 1)
        held.__enter__()

        started = time.monotonic()
        with store.repo.lock_attempt("run", 1) as hold:
            hold.check()
            assert 0.3 < time.monotonic() - started < 30
        held.__exit__(None, None, None)
