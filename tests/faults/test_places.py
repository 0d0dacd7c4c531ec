"""Stores in other places: on real filesystems that are mounted from images, on a network, and without an index."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.check.doctor import Diagnosis
from layerstore.disk import WeakDurability, files
from layerstore.storage import IndexNotice
from tests.faults.disks import is_remounted, mounted
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
            "runs": store.runs(),
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
    (sources / "plain").mkdir()
    return lived_there(sources / "plain", sources, sources)


# -- real filesystems ----------------------------------------------------------------------------------------------

EVERYWHERE = {"exclusive create", "hard links", "rename", "locks", "fsync", "clock"}


def verdicts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the worst verdict of each check."""
    order = ["ok", "note", "problem"]
    found: dict[str, str] = {}
    for finding in diagnosis.findings:
        found[finding.check] = max(found.get(finding.check, "ok"), finding.verdict, key=order.index)
    return found


def lived_there(place: Path, sources: Path, scratch: Path) -> dict[str, object]:
    """Make a store and use it; return what every verb answers."""
    layerstore.init(place / "store").close()
    return use_all(place / "store", sources, scratch)


def texts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return what is said of each check, the last line of each."""
    return {finding.check: finding.text for finding in diagnosis.findings}


@pytest.mark.parametrize(
    ("kind", "reflink"),
    [
        ("xfs", "works"),
        pytest.param("ext4", "none", marks=pytest.mark.exhaustive),
        pytest.param("btrfs", "works", marks=pytest.mark.exhaustive),
    ],
)
def test_disks_keep_every_promise(
    sources: Path, expected: dict[str, object], tmp_path: Path, kind: str, reflink: str
) -> None:
    """The doctor finds no problem, tells reflinks from copies, and a store lives there."""
    with mounted(kind, tmp_path / "disk") as place:
        diagnosis = layerstore.doctor(place / "store")

        assert diagnosis.problems == []
        assert dict.fromkeys(EVERYWHERE, "ok") == {check: verdicts(diagnosis)[check] for check in EVERYWHERE}
        assert texts(diagnosis)["filesystem"].startswith(f"{kind}, mounted at ")
        assert texts(diagnosis)["reflink"].startswith(reflink)
        assert texts(diagnosis)["locks"].startswith("flock keeps")
        assert lived_there(place, sources, tmp_path) == expected
        assert {path.name for path in place.iterdir()} - {"lost+found"} == {"store"}


@pytest.mark.exhaustive
def test_memory_is_a_problem_and_works(sources: Path, expected: dict[str, object], tmp_path: Path) -> None:
    """Everything works there, until the power goes."""
    with mounted("tmpfs", tmp_path / "disk", 64 << 20) as place:
        assert [finding.check for finding in layerstore.doctor(place).problems] == ["filesystem"]
        assert lived_there(place, sources, tmp_path) == expected


def test_fuse_is_taken_for_a_network(
    sources: Path, expected: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell what is behind it: the index lies elsewhere, and a store lives there."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    with mounted("bindfs", tmp_path / "disk") as place:
        diagnosis = layerstore.doctor(place / "store")

        assert verdicts(diagnosis)["filesystem"] == "note"
        assert texts(diagnosis)["locks"].endswith("whether it reaches other hosts depends on the mount")
        assert texts(diagnosis)["index"].startswith(f"at {tmp_path}/index/STORE-ID")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeakDurability)  # what FUSE answers to fsync depends on its version
            assert lived_there(place, sources, tmp_path) == expected
        assert not (place / "store" / "manifest").exists()


def test_a_filesystem_without_links_is_no_place(tmp_path: Path) -> None:
    """The doctor says so, and ``init`` fails instead of making half a store."""
    with mounted("vfat", tmp_path / "disk") as place:
        assert verdicts(layerstore.doctor(place))["hard links"] == "problem"
        with pytest.raises(layerstore.LayerstoreError):
            layerstore.init(place / "store")


def test_a_read_only_mount_is_told(tmp_path: Path) -> None:
    """A store there can be read; a new one cannot be made."""
    with mounted("ext4", tmp_path / "disk") as place:
        layerstore.init(place / "store").close()
        if not is_remounted(place, "ro"):
            pytest.skip("remounting is not allowed here")

        old, new = layerstore.doctor(place / "store"), layerstore.doctor(place / "new")

        assert (verdicts(old)["writing"], verdicts(new)["writing"]) == ("note", "problem")
        with warnings.catch_warnings(), Store(place / "store") as store:
            warnings.simplefilter("ignore", IndexNotice)
            assert store.log() == []


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
    assert {path.name for path in (network / "store" / "locks").iterdir()} == {"gc.lock", "run-run.lock"}


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
