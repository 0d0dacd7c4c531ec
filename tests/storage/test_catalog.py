"""Promises of the index: it makes answers fast and never changes them, whatever happens to its files."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from layerstore.disk import Files, files
from layerstore.disk.files import network_filesystem
from layerstore.errors import IntegrityError, InvalidInput, StorageIO
from layerstore.layout import Layout
from layerstore.limits import PAGE_BYTES
from layerstore.model import Commit, CommitId, ObjectId
from layerstore.storage import IndexNotice, RecordStore, Repository, RunView, index_directory, open_repository, row_of
from layerstore.storage.index import Index, IndexUnusable
from tests.unit import samples


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """Return the repository of a store with three commits, all indexed."""
    made = samples.repo(tmp_path / "store")
    for step in (2, 4, 6):
        publish(made, samples.commit(samples.record(step=step)))
    made.catalog.view("sft")
    yield made
    made.catalog.close()


def differences(repo: Repository) -> list[str]:
    """Return the records that the index tells differently than they do."""
    rows = repo.catalog.indexed("sft")
    return [name for name, row in rows.items() if row_of(repo.records.read(row.name)) != row]


def publish(repo: Repository, commit: Commit) -> Commit:
    """Publish *commit* and tell the index."""
    repo.records.link(commit)
    repo.catalog.add(commit)
    return commit


@contextlib.contextmanager
def reopened(repo: Repository) -> Iterator[Repository]:
    """Open the store afresh, as another process would."""
    repo.catalog.close()
    again = open_repository(repo.layout.root, Files())
    try:
        yield again
    finally:
        again.catalog.close()


def steps(view: RunView) -> list[int]:
    """Return the visible steps."""
    return [row.step for row in view.visible]


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.fault(92)
def test_a_commit_that_the_index_does_not_know_is_found(repo: Repository) -> None:
    """An index that is behind, on another node or after a crash, is caught up from the listing."""
    repo.records.link(samples.commit(samples.record(step=8)))

    assert steps(repo.catalog.view("sft")) == [2, 4, 6, 8]
    with contextlib.closing(Index(repo.layout.index, store_id=repo.identity.store_id)) as index:
        assert len(index.rows("sft")) == 4


@pytest.mark.fault(93)
def test_commits_that_are_no_longer_there_are_told_once(repo: Repository) -> None:
    """Whoever finds rows without records names them; their rows go, and the next one finds nothing to tell."""
    gone = repo.catalog.view("sft").visible[1:]
    for row in gone:
        repo.layout.record(row.run, row.step, row.id).unlink()

    named = ", ".join(f"sft@{row.step} ({row.id[:12]})" for row in gone)
    with reopened(repo) as again:
        with pytest.warns(IndexNotice, match=rf"^the commits {re.escape(named)} are no longer there \(a collection"):
            assert steps(again.catalog.view("sft")) == [2]
        assert again.catalog.view("sft").damaged == {}
    with reopened(repo) as again:
        assert steps(again.catalog.view("sft")) == [2]


@pytest.mark.fault(93)
def test_a_run_that_is_no_longer_there_is_told(repo: Repository) -> None:
    """Also by whoever asks which runs there are; of many commits the first ones are named."""
    for step in range(10, 20):
        publish(repo, samples.commit(samples.record(step=step)))
    shutil.rmtree(repo.layout.run("sft"))

    with (
        reopened(repo) as again,
        pytest.warns(IndexNotice, match=r"^the commits sft@2 .* and 3 more are no longer there"),
    ):
        assert again.catalog.runs() == []
    with reopened(repo) as again:
        assert again.catalog.runs() == []


def test_what_the_caller_removed_is_not_told(repo: Repository) -> None:
    """A collection tells the index itself, so neither it nor another look finds a row without a record."""
    other = open_repository(repo.layout.root, Files())
    assert steps(other.catalog.view("sft")) == [2, 4, 6]
    name = repo.catalog.view("sft").visible[0].name
    repo.records.remove([name])
    repo.catalog.forget([name])

    assert steps(repo.catalog.view("sft")) == [4, 6]
    assert steps(other.catalog.view("sft")) == [4, 6]
    other.catalog.close()


def test_a_commit_of_another_process_is_read_once(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is known is completed from the index, and only what that lacks is read."""
    other = open_repository(repo.layout.root, Files())
    other.catalog.view("sft")
    commit = publish(repo, samples.commit(samples.record(step=8)))

    with monkeypatch.context() as patched:
        patched.delattr(RecordStore, "read")
        assert other.catalog.view("sft").rows[commit.id] == row_of(commit)
    other.catalog.close()


def test_a_row_says_of_each_layer_what_the_record_says(repo: Repository) -> None:
    """Versions, sizes, origins and counts of updates: a composite is planned from rows alone."""
    layers = [
        samples.entry("inherited", run="other", attempt=2, step=1, save_number=7),
        replace(samples.entry("uncounted", step=8), optimizer_step=None, version=samples.blob_ref("c")),
        samples.entry("own", step=8),
    ]
    commit = publish(repo, samples.commit(samples.record(step=8, layers=layers)))

    with reopened(repo) as again:
        row = again.catalog.view("sft").rows[commit.id]
        assert row.entries() == {entry.layer: entry for entry in commit.record.layers}
        assert row.entries(["own", "nobody"]) == {"own": commit.record.layers[2]}
        assert row.saved == (False, True, True)
        assert row.counted == (True, False, True)
        again.catalog.check(row.name, commit.record.layers)


def test_a_row_that_its_record_contradicts_is_found(repo: Repository) -> None:
    """What an answer rests on is held against the record, which is read and checked for it."""
    row = repo.catalog.view("sft").visible[0]
    [entry, *_] = row.entries().values()
    with pytest.raises(IntegrityError, match="does not match what was read of it before"):
        repo.catalog.check(row.name, [replace(entry, optimizer_step=10**6)])


@pytest.mark.parametrize("name", ["5" * 31 + "G", "5" * 34])
def test_a_record_that_names_no_id_is_damaged(repo: Repository, name: str) -> None:
    """A whole record may still claim anything; the others are shown beside it."""
    entry = samples.entry("head")
    wrong = replace(entry, version=replace(entry.version, id=ObjectId(name)))
    for record in (samples.record(step=8, layers=[wrong]), samples.record(step=10, supersedes=[CommitId(name)])):
        repo.records.link(samples.commit(record))

    with reopened(repo) as again:
        view = again.catalog.view("sft")
        assert steps(view) == [2, 4, 6]
        assert [each.step for each in view.damaged] == [8, 10]
        assert all("cannot be '555" in str(problem) for problem in view.damaged.values())


def test_runs_without_commits_are_none(repo: Repository) -> None:
    """An empty folder, left by a crash before the link, is not a run."""
    repo.layout.run("empty").mkdir()

    assert repo.catalog.runs() == ["sft"]


# -- damage to the index -------------------------------------------------------------------------------------------


def drop_all(folder: Path) -> None:
    """Remove the whole index."""
    shutil.rmtree(folder)


def one_page(folder: Path) -> None:
    """Leave the first meta page."""
    os.truncate(folder / "data.mdb", PAGE_BYTES)


def noise(folder: Path) -> None:
    """Write noise over the data file."""
    (folder / "data.mdb").write_bytes(b"noise" * 20_000)


@pytest.mark.filterwarnings("ignore::layerstore.storage.IndexNotice")
@pytest.mark.parametrize("harm", [drop_all, one_page, noise])
def test_a_damaged_index_changes_no_answer(repo: Repository, harm: Callable[[Path], None]) -> None:
    """Missing, cut, overwritten: the index is replaced, nothing is lost and no process dies."""
    repo.catalog.close()
    harm(repo.layout.index)
    with reopened(repo) as again:
        assert steps(again.catalog.view("sft")) == [2, 4, 6]
        publish(again, samples.commit(samples.record(step=8)))
        assert steps(again.catalog.view("sft")) == [2, 4, 6, 8]
    with reopened(repo) as again:
        assert steps(again.catalog.view("sft")) == [2, 4, 6, 8]
        assert differences(again) == []


@pytest.mark.fault(40)
def test_a_rebuild_is_told(repo: Repository) -> None:
    """Replacing a damaged index is one line of notice that says nothing is lost."""
    repo.catalog.close()
    noise(repo.layout.index)
    with (
        reopened(repo) as again,
        pytest.warns(IndexNotice, match="rebuilding it from the commit records; no record is lost"),
    ):
        assert steps(again.catalog.view("sft")) == [2, 4, 6]


def test_too_little_memory_says_nothing_of_the_index(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays where it is, for whoever can map it; the answer comes without."""
    repo.catalog.close()

    def refuse(*_: object, **__: object) -> None:
        raise lmdb.MemoryError("Cannot allocate memory") from OSError(errno.ENOMEM, "it says so by its code otherwise")

    with monkeypatch.context() as poor:
        poor.setattr(lmdb, "open", refuse)
        with reopened(repo) as again, pytest.warns(IndexNotice, match="continuing without it, slower"):
            assert steps(again.catalog.view("sft")) == [2, 4, 6]

    assert (repo.layout.index / "data.mdb").exists()
    assert not [*repo.layout.root.glob("manifest.*")]


@pytest.mark.fault(39)
def test_every_flipped_value_is_found(repo: Repository) -> None:
    """Whichever byte of a row's value changes, the row is refused; none is answered from."""
    directory, store_id = repo.layout.index, repo.identity.store_id
    repo.catalog.close()

    def rewrite(key: bytes, value: bytes) -> None:
        with lmdb.open(str(directory), lib_version=0) as environment, environment.begin(write=True) as transaction:
            transaction.put(key, value)

    with lmdb.open(str(directory), lib_version=0) as environment, environment.begin() as transaction:
        key, data = next((bytes(key), bytes(value)) for key, value in transaction.cursor() if key.startswith(b"step/"))
    for position in range(0, len(data), 7):
        rewrite(key, data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with contextlib.closing(Index(directory, store_id=store_id)) as index, pytest.raises(IndexUnusable):
            index.rows("sft")
    rewrite(key, data)
    with contextlib.closing(Index(directory, store_id=store_id)) as index:
        assert len(index.rows("sft")) == 3


def test_a_row_under_another_key_is_found(repo: Repository) -> None:
    """A whole row that a damaged page shows under another key is refused."""
    directory = repo.layout.index
    repo.catalog.close()
    with lmdb.open(str(directory), lib_version=0) as environment, environment.begin(write=True) as transaction:
        first, second = [bytes(key) for key, _ in transaction.cursor() if key.startswith(b"step/")][:2]
        other = transaction.get(second)
        assert other is not None
        transaction.put(first, other)
    with (
        contextlib.closing(Index(directory, store_id=repo.identity.store_id)) as index,
        pytest.raises(IndexUnusable),
    ):
        index.rows("sft")


@pytest.mark.fault(99, 100)
@pytest.mark.filterwarnings("ignore:.*rebuilding:layerstore.storage.IndexNotice")
def test_no_index_at_all_is_only_slower(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the index cannot be made answers come from the records, with a notice; a rebuild says why it fails."""
    repo.catalog.close()
    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", "/proc/nowhere")
    again = open_repository(repo.layout.root, Files())
    with pytest.warns(IndexNotice, match="slower; no record is lost"):
        view = again.catalog.view("sft")

    assert steps(view) == [2, 4, 6]
    assert again.catalog.index_problem
    with (
        pytest.warns(IndexNotice, match="slower; no record is lost"),
        pytest.raises(StorageIO, match="no record is lost, and queries work without the index") as caught,
    ):
        again.catalog.rebuild()
    assert caught.value.errno == errno.ENOENT
    assert "LAYERSTORE_MANIFEST_DIR" in (caught.value.hint or "")


@pytest.mark.fault(101)
def test_a_rebuild_equals_the_original(repo: Repository) -> None:
    """Reindexing gives the same rows, and tells how many records it covers."""
    before = repo.catalog.view("sft")

    assert repo.catalog.rebuild() == 3
    assert repo.catalog.view("sft") == before


# -- LMDB's own traps ----------------------------------------------------------------------------------------------


@pytest.mark.fault(32)
def test_the_index_grows_when_it_is_full(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full map is doubled and the write repeated, unseen by whoever asked."""
    repo.catalog.close()
    shutil.rmtree(repo.layout.index)
    monkeypatch.setattr("layerstore.storage.index.INDEX_MAP_BYTES", 64 * 1024)
    names = [f"layer.{step}".ljust(2000, ".") for step in range(100)]
    commits = [samples.commit(samples.record(step=step, layers=[samples.entry(names[step])])) for step in range(100)]
    with contextlib.closing(Index(repo.layout.index, store_id=repo.identity.store_id)) as index:
        for commit in commits:
            index.add([row_of(commit)])

        assert list(index.rows("sft").values()) == [row_of(commit) for commit in commits]


# -- where the index lives -----------------------------------------------------------------------------------------

MOUNTS = """
22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /data rw shared:2 - nfs4 server:/data rw
31 30 8:2 / /data/local rw shared:3 - xfs /dev/sdb1 rw
32 22 0:41 / /mnt/with\\040space rw - fuse.sshfs host: rw
33 22 0:42 / /scratch rw master:7 - lustre mds:/scratch rw
""".lstrip()


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system's list of mounts be the one above."""
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(files, "_MOUNTS", tmp_path / "mountinfo")


@pytest.mark.fault(31)
@pytest.mark.usefixtures("mounts")
def test_network_filesystems_are_recognised() -> None:
    """The innermost mount decides, and names that only begin alike do not."""
    kinds = {
        "/home/u/store": None,
        "/data/store": "nfs4",
        "/data/local/store": None,
        "/dataset/store": None,
        "/mnt/with space/store": "fuse.sshfs",
        "/scratch": "lustre",
    }

    assert kinds == {path: network_filesystem(Path(path)) for path in kinds}


@pytest.mark.fault(31, 94)
@pytest.mark.usefixtures("mounts")
def test_the_index_is_kept_off_network_filesystems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a local store; for one on the network in a folder of this node, under the store's id."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/home/u/.cache")
    store_id = samples.STORE_ID

    assert index_directory(Layout(Path("/home/u/store")), store_id=store_id) == Path("/home/u/store/manifest")
    cached = index_directory(Layout(Path("/scratch/store")), store_id=store_id)
    assert cached.parent == Path("/home/u/.cache/layerstore/manifests")
    assert cached.name.startswith(f"{store_id}-")

    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", "/fast")
    chosen = index_directory(Layout(Path("/scratch/store")), store_id=store_id)
    assert chosen == Path("/fast") / cached.name
    assert chosen != index_directory(Layout(Path("/scratch/copy")), store_id=store_id)

    monkeypatch.setenv("LAYERSTORE_MANIFEST_DIR", "/data/index")
    with pytest.raises(InvalidInput, match="is on nfs4: an LMDB index must be on a local disk"):
        index_directory(Layout(Path("/scratch/store")), store_id=store_id)


@pytest.mark.fault(19)
def test_a_full_disk_does_not_kill_the_process(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lock file cannot get its blocks the index is left alone, with a notice, and answers stay."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    repo.catalog.close()
    shutil.rmtree(repo.layout.index)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    again = open_repository(repo.layout.root, Files())
    with pytest.warns(IndexNotice):
        assert steps(again.catalog.view("sft")) == [2, 4, 6]
