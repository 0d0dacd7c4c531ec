"""Real filesystems, mounted from images: what the doctor says of each, and a store that lives there."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

import layerstore
from layerstore.check.doctor import Diagnosis
from layerstore.storage import IndexNotice, WeakDurability
from layerstore.store import Store
from tests.faults.disks import is_remounted, mounted
from tests.faults.harness import composed, problems, tiny_checkpoint

pytestmark = pytest.mark.full

EVERYWHERE = {"exclusive create", "hard links", "rename", "race", "fsync", "clock"}


def verdicts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the worst verdict of each check."""
    order = ["ok", "note", "problem"]
    found: dict[str, str] = {}
    for finding in diagnosis.findings:
        found[finding.check] = max(found.get(finding.check, "ok"), finding.verdict, key=order.index)
    return found


def texts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return what is said of each check, the last line of each."""
    return {finding.check: finding.text for finding in diagnosis.findings}


def live_there(place: Path, scratch: Path) -> None:
    """Make a store, save, collect, compose and verify it."""
    with layerstore.init(place / "store") as store:
        for step in (2, 4):
            store.ingest(tiny_checkpoint(scratch / f"step{step}", step=step), run="run")
        store.gc(layerstore.Keep(last=1))
        expected = composed(store, "run@4", scratch)
    assert problems(place / "store", scratch, {"run@4": expected}) == []


@pytest.mark.parametrize(
    ("kind", "reflink"),
    [
        ("xfs", "works"),
        pytest.param("ext4", "none", marks=pytest.mark.exhaustive),
        pytest.param("btrfs", "works", marks=pytest.mark.exhaustive),
    ],
)
def test_disks_keep_every_promise(tmp_path: Path, kind: str, reflink: str) -> None:
    """The doctor finds no problem, tells reflinks from copies, and a store lives there."""
    with mounted(kind, tmp_path / "disk") as place:
        diagnosis = layerstore.doctor(place / "store")

        assert diagnosis.problems == []
        assert dict.fromkeys(EVERYWHERE, "ok") == {check: verdicts(diagnosis)[check] for check in EVERYWHERE}
        assert texts(diagnosis)["filesystem"].startswith(f"{kind}, mounted at ")
        assert texts(diagnosis)["reflink"].startswith(reflink)
        assert texts(diagnosis)["locks"].startswith("flock keeps")
        live_there(place, tmp_path)
        assert {path.name for path in place.iterdir()} - {"lost+found"} == {"store"}


@pytest.mark.exhaustive
def test_memory_is_a_problem_and_works(tmp_path: Path) -> None:
    """Everything works there, until the power goes."""
    with mounted("tmpfs", tmp_path / "disk", 64 << 20) as place:
        assert [finding.check for finding in layerstore.doctor(place).problems] == ["filesystem"]
        live_there(place, tmp_path)


def test_fuse_is_taken_for_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell what is behind it: the index lies elsewhere, locks are leases, and a store lives there."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    with mounted("bindfs", tmp_path / "disk") as place:
        diagnosis = layerstore.doctor(place / "store")

        assert verdicts(diagnosis)["filesystem"] == "note"
        assert texts(diagnosis)["locks"].startswith("leases; flock works")
        assert texts(diagnosis)["index"].startswith(f"at {tmp_path}/index/STORE-ID")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeakDurability)  # what FUSE answers to fsync depends on its version
            live_there(place, tmp_path)
        assert not (place / "store" / "manifest").exists()
        assert list((place / "store" / "locks").glob("gc.lock.*"))


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
