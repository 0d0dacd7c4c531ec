"""
Stores in places that are not one user's own disk: on a network, shared by users, without an index.

The system's list of mounts is made up where it takes a network; users are real.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import InvalidInput
from layerstore.storage import IndexNotice, files, locks, manifest_directory
from tests.faults.harness import Failure, attempt, composed, in_child, problems, tiny_checkpoint

pytestmark = pytest.mark.full

NOBODY, OTHER, GROUP = 65534, 65533, 65533


@pytest.fixture(scope="module")
def sources(fast_module_path: Path) -> Path:
    """Return a folder with two checkpoints."""
    for step in (2, 4):
        tiny_checkpoint(fast_module_path / f"step{step}", step=step)
    # Others than who runs the tests read them too; what is executable belongs to a commit.
    for each in (fast_module_path, *fast_module_path.rglob("*")):
        each.chmod(0o755 if each.is_dir() else 0o644)
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


def test_an_index_is_not_forced_onto_the_network(network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason; and nothing was written."""
    layerstore.init(network / "store").close()
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", str(network / "index"))

    with pytest.raises(InvalidInput, match="which is on nfs4: an LMDB index must be on a local disk") as caught:
        Store(network / "store")

    assert caught.value.hint
    assert not (network / "index").exists()


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


def _forbidden(path: Path) -> None:
    os.environ["LAYERSTORE_MANIFEST_DIR"] = "/proc/nowhere"


def _unwanted(path: Path) -> None:
    os.environ["LAYERSTORE_NO_INDEX"] = "1"


def _without(how: Callable[[Path], None], path: Path, sources: Path, scratch: Path) -> dict[str, object]:
    layerstore.init(path).close()
    how(path)
    return use_all(path, sources, scratch)


@pytest.mark.parametrize("how", [_forbidden, _unwanted])
def test_every_verb_works_without_an_index(
    sources: Path, fast_path: Path, expected: dict[str, object], how: Callable[[Path], None]
) -> None:
    """It cannot be made, or is not wanted: the same answers, with a notice unless that was asked for."""
    outcome = in_child(_without, how, fast_path / "store", sources, fast_path)

    assert outcome.needed() == expected
    assert not (fast_path / "store" / "manifest" / "data.mdb").exists()
    kinds = {notice.split(":")[0] for notice in outcome.notices}
    assert kinds == (set() if how is _unwanted else {"IndexNotice"})


# -- several users -------------------------------------------------------------------------------------------------


def _as_user(sources: Path, user: int, umask: int, work: Callable[..., object], *args: object) -> object:
    # Once as root: others may not be allowed to import what is still missing.
    with tempfile.TemporaryDirectory() as folder:
        _make_and_ingest(Path(folder) / "warm", sources / "step2")
        problems(Path(folder) / "warm", Path(folder), {})
    os.umask(umask)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(GROUP)
        os.setuid(user)
    return work(*args)


def _ingest(path: Path, source: Path, run: str) -> Failure | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IndexNotice)
        return attempt(lambda: Store(path).ingest(source, run=run))


def _make_and_ingest(path: Path, source: Path) -> None:
    with layerstore.init(path) as store:
        store.ingest(source, run="run")


@pytest.fixture
def shared(sources: Path) -> Iterator[Path]:
    """Yield a folder of a group that two users are in."""
    if os.getuid() != 0:
        pytest.skip("only root may become others")
    folder = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"layerstore-shared-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chown(folder, NOBODY, GROUP)
    folder.chmod(0o2775)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "umask", [0o027, *(pytest.param(mask, marks=pytest.mark.exhaustive) for mask in (0o077, 0o002))]
)
def test_modes_follow_the_umask(shared: Path, sources: Path, umask: int) -> None:
    """Every file and folder of a store, its index and its locks included."""
    in_child(_as_user, sources, NOBODY, umask, _make_and_ingest, shared / "store", sources / "step2").needed()

    for path in [shared / "store", *(shared / "store").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode) & 0o777
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, path


def test_two_users_share_a_store(shared: Path, sources: Path, fast_path: Path) -> None:
    """A common group, the setgid bit and umask 002 are enough: each uses what the other has saved."""
    path = shared / "store"
    in_child(_as_user, sources, NOBODY, 0o002, _make_and_ingest, path, sources / "step2").needed()

    again = in_child(_as_user, sources, OTHER, 0o002, _ingest, path, sources / "step2", "theirs").needed()
    new = in_child(_as_user, sources, OTHER, 0o002, _ingest, path, sources / "step4", "run").needed()

    assert (again, new) == (None, None)
    assert problems(path, fast_path, {}) == []


def test_what_another_user_may_not_write_is_said_with_owner_and_mode(
    shared: Path, sources: Path, fast_path: Path
) -> None:
    """Exit code 12, the path, whose it is, and how a store is shared; nothing is harmed."""
    path = shared / "store"
    in_child(_as_user, sources, NOBODY, 0o022, _make_and_ingest, path, sources / "step2").needed()

    failure = in_child(_as_user, sources, OTHER, 0o022, _ingest, path, sources / "step4", "theirs").needed()

    assert failure.exit_code == 12
    assert str(path) in failure.message
    assert f"user {NOBODY}'s" in failure.hint
    assert "with mode 2755" in failure.hint
    assert f"you are user {OTHER}" in failure.hint
    assert "umask 002" in failure.hint
    assert problems(path, fast_path, {}) == []


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
