"""Promises of the doctor: it says what a place can do, in lines one can paste, and leaves nothing there."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore
from layerstore.check import Diagnosis, probes
from layerstore.check.probes import Finding
from layerstore.disk import Files, files
from layerstore.disk.open_files import Room
from layerstore.errors import InvalidInput
from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # noqa: PLC0414  # a fixture, named again for mypy

MOUNTS = """
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
33 22 0:42 / {scratch} rw,noatime master:7 - {kind} mds:/scratch rw
34 22 0:43 / {cache} rw - {cache_kind} /dev/sdb1 rw
"""


def found(diagnosis: Diagnosis, check: str) -> Finding:
    """Return the first finding of *check*."""
    return next(finding for finding in diagnosis.findings if finding.check == check)


def mounted(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, *, cache: Path | None = None, cache_kind: str = "ext4"
) -> None:
    """Let *folder* be on a filesystem of *kind*, and the user's cache on another."""
    cache = cache or folder.parent / "cache"
    listing = folder.parent / "mountinfo"
    listing.write_text(MOUNTS.format(scratch=folder, kind=kind, cache=cache, cache_kind=cache_kind).lstrip())
    monkeypatch.setattr(files, "_MOUNTS", listing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def tree(folder: Path) -> list[str]:
    """Return all that is below *folder*."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- places --------------------------------------------------------------------------------------------------------


def test_a_good_place_has_no_problems(tmp_path: Path) -> None:
    """Everything is tried out below a folder that is not there yet."""
    diagnosis = layerstore.doctor(tmp_path / "new" / "store")

    checks = {finding.check for finding in diagnosis.findings}
    assert diagnosis.problems == [] or found(diagnosis, "filesystem").verdict == "problem"
    assert checks >= set("store filesystem index writing rename locks fsync reflink names clock space".split())  # noqa: SIM905
    assert {"exclusive create", "hard links"} <= checks
    assert found(diagnosis, "store").text == f"none yet; layerstore init {tmp_path}/new/store makes one"
    assert found(diagnosis, "locks").verdict == "ok"
    assert tree(tmp_path) == []


def test_a_store_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    """Not even an index is made."""
    with layerstore.init(tmp_path / "store") as store:
        store_id = store.id
    before = tree(tmp_path)

    diagnosis = layerstore.doctor(tmp_path / "store")

    assert found(diagnosis, "store").text == f"format 2, id {store_id}"
    assert tree(tmp_path) == before


def test_a_store_that_cannot_be_opened_is_examined_all_the_same(tmp_path: Path) -> None:
    """Its own error is a problem, with its hint; the place may be sound."""
    layerstore.init(tmp_path / "store").close()
    (tmp_path / "store" / "store.json").write_text("{}")

    diagnosis = layerstore.doctor(tmp_path / "store")

    assert [finding.check for finding in diagnosis.problems if finding.check != "filesystem"] == ["store"]
    assert "is damaged" in found(diagnosis, "store").text
    assert found(diagnosis, "store").hint
    assert found(diagnosis, "fsync").verdict == "ok"


def test_what_is_no_place_for_a_store_is_said_to_be(tmp_path: Path) -> None:
    """A folder that holds something else, which ``init`` would refuse; a file, and what would lie below it."""
    (tmp_path / "file").touch()
    full = found(layerstore.doctor(tmp_path), "store")

    assert (full.verdict, full.text) == ("note", "none, and this is not empty")
    assert found(layerstore.doctor(tmp_path / "file"), "store").verdict == "problem"
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert found(layerstore.doctor(path), "writing").verdict == "problem"
    with pytest.raises(InvalidInput):
        layerstore.doctor("with\0nul")


def test_a_place_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No new store can be made there; an old one can be read."""
    layerstore.init(tmp_path / "store").close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    assert found(layerstore.doctor(tmp_path / "new"), "writing").verdict == "problem"
    old = layerstore.doctor(tmp_path / "store")
    assert found(old, "writing").verdict == "note"
    assert found(old, "index").verdict == "note"
    assert "fsync" not in {finding.check for finding in old.findings}


def test_who_may_write_is_told(tmp_path: Path) -> None:
    """A folder that anybody may write to is not a place for what must not be changed."""
    tmp_path.chmod(0o777)
    assert found(layerstore.doctor(tmp_path), "writing").verdict == "note"
    assert found(layerstore.doctor(tmp_path / "new"), "writing").verdict == "ok"  # it gets its own mode
    tmp_path.chmod(0o700)
    old = os.umask(0o077)
    try:
        assert "mode 0600, new folders 0700" in found(layerstore.doctor(tmp_path), "writing").text
    finally:
        os.umask(old)


# -- filesystems ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lustre", "fuse.sshfs"])
def test_on_a_network_the_index_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It says where to, warns of what is seen late, and of purging where that is usual."""
    mounted(monkeypatch, tmp_path / "scratch", kind)

    diagnosis = layerstore.doctor(tmp_path / "scratch" / "store")

    assert found(diagnosis, "filesystem").verdict == "note"
    assert f"{kind}, mounted at {tmp_path}/scratch (rw,noatime)" in found(diagnosis, "filesystem").text
    text = found(diagnosis, "index").text
    assert re.fullmatch(rf"at {tmp_path}/cache/layerstore/manifests/STORE-ID-\w{{8}}, on ext4", text)
    assert found(diagnosis, "locks").text.endswith("whether it reaches other hosts depends on the mount")
    assert ("purging" in {finding.check for finding in diagnosis.findings}) == (kind == "lustre")
    assert diagnosis.ok


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("rw,vers=4.2,hard,lookupcache=pos", []),
        ("rw,vers=4.2,hard", ["may stay missing here for a minute"]),
        ("rw,vers=3,soft,lookupcache=none", ["mounted soft"]),
    ],
)
def test_how_nfs_is_mounted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: list[str]
) -> None:
    """What makes other hosts' files late, or a save fail, with what to mount instead."""
    mounted(monkeypatch, tmp_path / "scratch", "nfs4")
    listing = tmp_path / "mountinfo"
    listing.write_text(listing.read_text().replace("mds:/scratch rw", f"mds:/scratch {options}"))

    found = [finding for finding in layerstore.doctor(tmp_path / "scratch").findings if finding.check == "mount"]

    assert [word for word in words if any(word in finding.text for finding in found)] == words
    assert [finding.verdict for finding in found] == ["note"] * len(words)
    assert all(str(finding.hint).startswith("mount with ") for finding in found)


@pytest.mark.parametrize("kind", ["ext4", "nfs4"])
def test_the_hosts_of_a_store_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A host that is to share a store has to show in it; in a folder of this host alone another one is a surprise."""
    layerstore.init(tmp_path / "scratch" / "store").close()
    mounted(monkeypatch, tmp_path / "scratch", kind)
    with layerstore.open(tmp_path / "scratch" / "store") as store:
        store.reindex()
    alone = [finding for finding in layerstore.doctor(store.path).findings if finding.check == "hosts"]
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    (store.path / "locks" / "odd").write_bytes(b"\xff{")
    [finding] = [finding for finding in layerstore.doctor(store.path).findings if finding.check == "hosts"]

    if kind == "nfs4":
        assert [each.text for each in alone] == [
            "no other host has locked this store yet; run layerstore reindex on one: doctor must then name it"
        ]
        assert finding.verdict == "ok"
        assert finding.text.startswith("seen here: ")
    else:
        assert alone == []
        assert finding.verdict == "note"
        assert "it is a copy, or served by this host" in finding.text


def test_an_index_that_is_forced_onto_a_network_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, and what to set; and where it is set well, that is said."""
    mounted(monkeypatch, tmp_path / "scratch", "nfs4")
    for place, verdict, words in (
        ("scratch/index", "problem", "is on nfs4: an LMDB index must be on a local disk"),
        ("fast", "ok", ", as LAYERSTORE_MANIFEST_DIR says, on ext4"),
    ):
        monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(tmp_path / place))
        finding = found(layerstore.doctor(tmp_path / "scratch"), "index")

        assert finding.verdict == verdict
        assert f"{tmp_path}/{place}" in finding.text
        assert words in finding.text


@pytest.mark.parametrize(
    ("kind", "verdict"), [("tmpfs", "problem"), ("overlay", "note"), ("xfs", "ok"), (None, "note")]
)
def test_what_goes_with_the_power_or_the_container_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, verdict: str
) -> None:
    """Memory keeps no promise; and not every system lists its mounts."""
    mounted(monkeypatch, tmp_path / "scratch", kind or "xfs")
    if kind is None:
        monkeypatch.setattr(files, "_MOUNTS", tmp_path / "none")

    assert found(layerstore.doctor(tmp_path / "scratch"), "filesystem").verdict == verdict


# -- what fails ----------------------------------------------------------------------------------------------------


def refuse(number: int) -> Callable[..., object]:
    """Return what answers with an error."""

    def answer(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    return answer


def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT: a rename that replaces nothing does as well; where there is none, a store cannot be written."""
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    assert found(layerstore.doctor(tmp_path), "hard links").verdict == "ok"

    for number in (errno.EPERM, errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr("layerstore.disk.files.rename_exclusive", refuse(number))
        finding = found(layerstore.doctor(tmp_path), "hard links")

        assert (finding.verdict, finding.text) == ("problem", "neither they nor renames protect a name that is taken")


def test_folders_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That breaks the first promise."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):  # noqa: PTH112  # follows the link
            raise OSError(errno.EINVAL, "made up")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)

    finding = found(layerstore.doctor(tmp_path), "fsync")

    assert finding.verdict == "problem"
    assert "a power cut may undo what was reported as saved" in finding.text


def test_a_disk_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lines are there all the same."""
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))

    diagnosis = layerstore.doctor(tmp_path)

    assert "Input/output error" in found(diagnosis, "fsync").text
    assert found(diagnosis, "fsync").verdict == "problem"
    assert found(diagnosis, "clock").verdict == "ok"
    assert tree(tmp_path) == []


def test_a_full_disk_is_one_problem(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about links and syncs: they could not be tried. In a store, gc is the next step."""
    store = tmp_path / "store"
    layerstore.init(store).close()
    mounted(monkeypatch, tmp_path, "ext4")
    monkeypatch.setattr(os, "pwrite", refuse(errno.ENOSPC))

    in_store, elsewhere = run("doctor", store), layerstore.doctor(tmp_path / "new")

    [problem] = elsewhere.problems
    assert problem.check == "space"
    assert problem.text.endswith(": hard links, rename, fsync, reflink could not be tried")
    assert problem.hint == "free some space there, or choose another disk"
    assert "not fit for a store: 1 problem" in in_store.out
    assert in_store.err.splitlines()[-1].startswith(f"hint: layerstore --store {store} gc --dry-run shows")


@pytest.mark.parametrize(("ahead", "verdict"), [(-310, "note"), (290, "ok"), (310, "note")])
def test_clocks_that_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, verdict: str) -> None:
    """Five minutes are too much."""
    monkeypatch.setattr(Files, "modified_ns", lambda self, path: time.time_ns() + ahead * 10**9)

    assert found(layerstore.doctor(tmp_path), "clock").verdict == verdict


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "verdict"), [(10**12, 10**6, "ok"), (10**8, None, "note"), (10**12, 5, "note")]
)
def test_little_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, free_files: int | None, verdict: str
) -> None:
    """Bytes and files both run out."""
    room = Room(total_bytes=10**13, free_bytes=free_bytes, free_files=free_files)
    monkeypatch.setattr(Files, "room", lambda self, path: room)

    assert found(layerstore.doctor(tmp_path), "space").verdict == verdict


def test_room_on_a_small_disk_is_told_in_a_unit_that_fits_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as 0.0 of 0.0 GB."""
    room = Room(total_bytes=16_700_000, free_bytes=4_200_000, free_files=None)
    monkeypatch.setattr(Files, "room", lambda self, path: room)

    assert found(layerstore.doctor(tmp_path), "space").text.startswith("4.2 MB of 16.7 MB free, ")


@pytest.mark.parametrize("answer", [None, True])
def test_locks_that_keep_nobody_out_are_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bool | None
) -> None:
    """The filesystem has no flock, or grants it to everybody: no promise depends on it."""
    monkeypatch.setattr(probes, "try_flock", lambda fd, path: answer)

    assert found(layerstore.doctor(tmp_path), "locks").verdict == "note"


def test_names_that_cannot_be_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upper and lower case may be one."""
    monkeypatch.setattr(Files, "exists", lambda self, path: path.name == "NAME" or path.exists())

    assert found(layerstore.doctor(tmp_path), "names").verdict == "note"


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_report_can_be_pasted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain words for each verdict, the path as it was given, no home folder's owner, no colour."""
    home = tmp_path / "secret-owner"
    (home / ".cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    mounted(monkeypatch, tmp_path / "scratch", "lustre", cache=home / ".cache")
    monkeypatch.chdir(tmp_path)

    outcome = run("doctor", "scratch/store")

    lines = outcome.out.splitlines()
    versions = next(number for number, line in enumerate(lines) if line.startswith("versions: layerstore "))
    assert outcome.code == 0
    assert lines[0] == "layerstore doctor scratch/store"
    assert {line.split()[0] for line in lines[1:versions] if line[:1].strip()} == {"ok", "note"}
    assert all(line.startswith("  ") for line in lines[versions + 1 : -1])
    assert lines[-1] == "fit for a store: 0 problems, 2 notes"
    assert "secret-owner" not in outcome.out
    assert "~/.cache/layerstore/manifests" in outcome.out
    assert "\x1b" not in outcome.out


def test_a_problem_has_its_exit_code(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report comes first, for people and programs; then the error names what is wrong."""
    mounted(monkeypatch, tmp_path, "tmpfs")

    people = run("doctor", tmp_path)
    programs = run("doctor", tmp_path, "--json")

    assert (people.code, programs.code) == (1, 1)
    assert people.err.splitlines()[0] == f"error: promises cannot be kept at {tmp_path}: filesystem"
    assert "problem  filesystem" in people.out
    assert programs.fields["ok"] is False
    assert programs.error["kind"] == "failure"
    verdicts = {finding["check"]: finding["verdict"] for finding in programs.fields["findings"]}
    assert verdicts["filesystem"] == "problem"
    assert programs.fields["versions"]["lmdb engine"].startswith("0.9.")
    assert programs.fields["versions"]["torch"][0].isdigit()
    assert programs.fields["path"] == str(tmp_path)


def test_ctrl_c_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the middle: the folder of trial files is gone."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(probes, "try_flock", stop)

    with pytest.raises(KeyboardInterrupt):
        layerstore.doctor(tmp_path)

    assert tree(tmp_path) == []
