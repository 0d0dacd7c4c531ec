"""
Real filesystems, mounted from images: what the doctor says of each, and a store that lives there.

Skipped where mounting is not allowed, or a filesystem's tools are not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import layerstore
from layerstore.check.doctor import Diagnosis
from layerstore.storage import IndexNotice, WeakDurability
from layerstore.store import Store
from tests.faults.harness import composed, problems, tiny_checkpoint

pytestmark = pytest.mark.full

IMAGE_BYTES = 320 << 20  # XFS wants 300
MAKERS = {"ext4": ["mkfs.ext4", "-q"], "xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"], "vfat": ["mkfs.vfat"]}
EVERYWHERE = {"exclusive create", "hard links", "rename", "race", "fsync", "clock"}


def run(*command: object) -> bool:
    """Run a tool; return whether it went well."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([*map(str, command)], check=False, capture_output=True).returncode == 0


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[ExitStack]:
    """Unmount afterwards what a test mounts."""
    if os.getuid() != 0:
        pytest.skip("only root may mount")
    with ExitStack() as stack:
        yield stack


def mounted(kind: str, folder: Path, mounts: ExitStack) -> Path:
    """Mount a new filesystem of *kind* in *folder*."""
    folder.mkdir()
    if kind == "tmpfs":
        command: list[object] = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder]
    elif kind == "bindfs":
        behind = folder.with_name("behind")
        behind.mkdir()
        command = ["bindfs", behind, folder]
    else:
        image = folder.with_name("image")
        image.touch()
        os.truncate(image, IMAGE_BYTES)
        if not run(*MAKERS[kind], image):
            pytest.skip(f"{kind} cannot be made here")
        command = ["mount", "-o", "loop", image, folder]
    if not run(*command):
        pytest.skip(f"{kind} cannot be mounted here")
    mounts.callback(run, "umount", "-l", folder)
    return folder


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


def live_there(folder: Path, scratch: Path) -> None:
    """Make a store, save, collect, compose and verify it."""
    with layerstore.init(folder / "store") as store:
        for step in (2, 4):
            store.ingest(tiny_checkpoint(scratch / f"step{step}", step=step), run="run")
        store.gc(layerstore.Keep(last=1))
        expected = composed(store, "run@4", scratch)
    assert problems(folder / "store", scratch, {"run@4": expected}) == []


@pytest.mark.parametrize(
    ("kind", "reflink"),
    [
        ("xfs", "works"),
        pytest.param("ext4", "none", marks=pytest.mark.exhaustive),
        pytest.param("btrfs", "works", marks=pytest.mark.exhaustive),
    ],
)
def test_disks_keep_every_promise(mounts: ExitStack, tmp_path: Path, kind: str, reflink: str) -> None:
    """The doctor finds no problem, tells reflinks from copies, and a store lives there."""
    folder = mounted(kind, tmp_path / "disk", mounts)

    diagnosis = layerstore.doctor(folder / "store")

    assert diagnosis.problems == []
    assert dict.fromkeys(EVERYWHERE, "ok") == {check: verdicts(diagnosis)[check] for check in EVERYWHERE}
    assert texts(diagnosis)["filesystem"].startswith(f"{kind}, mounted at ")
    assert texts(diagnosis)["reflink"].startswith(reflink)
    assert texts(diagnosis)["locks"].startswith("flock keeps")
    live_there(folder, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted({"store", *_of_the_filesystem(kind)})


def _of_the_filesystem(kind: str) -> set[str]:
    return {"lost+found"} if kind == "ext4" else set()


@pytest.mark.exhaustive
def test_memory_is_a_problem_and_works(mounts: ExitStack, tmp_path: Path) -> None:
    """Everything works there, until the power goes."""
    folder = mounted("tmpfs", tmp_path / "disk", mounts)

    diagnosis = layerstore.doctor(folder)

    assert [finding.check for finding in diagnosis.problems] == ["filesystem"]
    live_there(folder, tmp_path)


def test_fuse_is_taken_for_a_network(mounts: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can tell what is behind it: the index lies elsewhere, locks are leases, and a store lives there."""
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / "index"))
    folder = mounted("bindfs", tmp_path / "disk", mounts)

    diagnosis = layerstore.doctor(folder / "store")

    assert verdicts(diagnosis)["filesystem"] == "note"
    assert texts(diagnosis)["locks"].startswith("leases; flock works")
    assert texts(diagnosis)["index"].startswith(f"at {tmp_path}/index/STORE-ID")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeakDurability)  # what FUSE answers to fsync depends on its version
        live_there(folder, tmp_path)
    assert not (folder / "store" / "manifest").exists()
    assert list((folder / "store" / "locks").glob("gc.lock.*"))


def test_a_filesystem_without_links_is_no_place(mounts: ExitStack, tmp_path: Path) -> None:
    """The doctor says so, and ``init`` fails instead of making half a store."""
    folder = mounted("vfat", tmp_path / "disk", mounts)

    diagnosis = layerstore.doctor(folder)

    assert verdicts(diagnosis)["hard links"] == "problem"
    with pytest.raises(layerstore.LayerstoreError):
        layerstore.init(folder / "store")


@pytest.mark.parametrize("kind", ["ext4"])
def test_a_read_only_mount_is_told(mounts: ExitStack, tmp_path: Path, kind: str) -> None:
    """A store there can be read; a new one cannot be made."""
    folder = mounted(kind, tmp_path / "disk", mounts)
    layerstore.init(folder / "store").close()
    if not run("mount", "-o", "remount,ro", folder):
        pytest.skip("remounting is not allowed here")

    old, new = layerstore.doctor(folder / "store"), layerstore.doctor(folder / "new")

    assert (verdicts(old)["writing"], verdicts(new)["writing"]) == ("note", "problem")
    with warnings.catch_warnings(), Store(folder / "store") as store:
        warnings.simplefilter("ignore", IndexNotice)
        assert store.log() == []
