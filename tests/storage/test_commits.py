"""Promises of commit records and pins on disk: the truth of the store, checked on every look."""

import errno
from pathlib import Path

import pytest

from layerstore.disk import Files
from layerstore.errors import AlreadyExists, IntegrityError, NotFound, StorageIO, Unsupported
from layerstore.format import seal_commit
from layerstore.model import Commit
from layerstore.storage import RecordName, Repository, open_repository
from tests.unit import samples


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    """Return the repository of a new store."""
    return samples.repo(tmp_path / "store")


def path_of(repo: Repository, commit: Commit) -> Path:
    """Return where *commit* is."""
    return repo.layout.record(commit.record.run, commit.record.step, commit.id)


def test_publishing_twice_is_one_commit(repo: Repository) -> None:
    """The same content again is told to be there, and its record is written afresh: the first may have rotted."""
    first, again = samples.commit(time_ns=1), samples.commit(time_ns=2)

    assert repo.records.link(first)
    assert not repo.records.link(again)
    assert repo.records.read(repo.records.name_of(first)) == again


@pytest.mark.fault(91)
def test_every_flipped_byte_of_a_record_is_found(repo: Repository) -> None:
    """No byte of a record's file changes unseen."""
    commit = samples.commit()
    repo.records.link(commit)
    path, name = path_of(repo, commit), repo.records.name_of(commit)
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(IntegrityError):
            repo.records.read(name)
    for end in (0, 1, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(IntegrityError):
            repo.records.read(name)


def test_entries_are_held_against_the_whole_record(repo: Repository) -> None:
    """The whole file is checked, whichever layer is asked for; so are its place and its name."""
    commit = samples.commit()
    repo.records.link(commit)
    repo.catalog.add(commit)
    path, name, entries = path_of(repo, commit), repo.records.name_of(commit), commit.record.layers[:1]
    repo.catalog.check(name, entries)
    data = path.read_bytes()
    for position in range(0, len(data), 5):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises((IntegrityError, Unsupported)):
            repo.catalog.check(name, entries)
    other = repo.layout.record("sft", 5, commit.id)
    other.write_bytes(seal_commit(commit, name=repo.layout.name(other), store_id=repo.identity.store_id))
    with pytest.raises(IntegrityError, match="does not hold the commit"):
        repo.catalog.check(RecordName("sft", 5, commit.id), entries)
    path.unlink()
    with pytest.raises(NotFound, match="removed by a collection meanwhile"):
        repo.catalog.check(name, entries)


@pytest.mark.fault(96)
def test_a_record_under_another_name_is_found(repo: Repository) -> None:
    """Copied to another step, run or id, a whole record is damage."""
    commit = samples.commit()
    repo.records.link(commit)
    path = path_of(repo, commit)
    (repo.layout.commits / "other").mkdir()
    copies = [
        path.with_name(f"5.{commit.id}"),
        path.with_name(f"4.{'0' * 32}"),
        repo.layout.commits / "other" / path.name,
    ]
    for copy in copies:
        copy.write_bytes(path.read_bytes())

    for run in ("sft", "other"):
        for name in repo.records.names(run):
            if repo.layout.record(name.run, name.step, name.id) != path:
                with pytest.raises(IntegrityError, match="moved or renamed"):
                    repo.records.read(name)


@pytest.mark.fault(96)
def test_a_record_of_another_store_is_found(repo: Repository, tmp_path: Path) -> None:
    """A record that was copied over from another store is damage."""
    other = samples.repo(tmp_path / "other")
    commit = samples.commit()
    other.records.link(commit)
    repo.layout.run("sft").mkdir()
    path_of(repo, commit).write_bytes(path_of(other, commit).read_bytes())

    with pytest.raises(IntegrityError, match="belongs to another store"):
        repo.records.read(repo.records.name_of(commit))


@pytest.mark.fault(95)
def test_a_missing_folder_of_commits_is_damage_not_emptiness(repo: Repository) -> None:
    """Where commits/ is gone nobody answers that there are none."""
    repo.layout.commits.rmdir()

    with pytest.raises(IntegrityError, match="is missing although this is a store"):
        repo.records.runs()


def test_strangers_are_told(repo: Repository) -> None:
    """Whatever lies among the records and is none is named for verify, and never taken for one."""
    repo.records.link(samples.commit())
    strangers = ["notes.txt", "04." + "a" * 32, "4." + "A" * 32, "-1." + "a" * 32, "4." + "a" * 31]
    for name in strangers:
        (repo.layout.run("sft") / name).write_bytes(b"")
    (repo.layout.commits / "README").write_bytes(b"")
    for name in (".best.swp", ".nfs0001", "best"):
        (repo.layout.pins / name).write_bytes(b"")

    assert {*strangers, "README", ".best.swp"} == {path.name for path in repo.records.strangers()}
    assert len(repo.records.names("sft")) == 1


def test_the_folder_is_synced_after_the_link(tmp_path: Path) -> None:
    """The record's bytes are synced, then linked, then its folder is synced: the commit point."""
    calls: list[tuple[str, str]] = []
    repo = samples.repo(tmp_path / "store", hook=lambda operation, path: calls.append((operation, path.name)))
    calls.clear()
    commit = samples.commit()
    repo.records.link(commit)

    link = calls.index(("link", f"4.{commit.id}"))
    assert [operation for operation, _ in calls[:link]] == ["mkdir", "fsync", "create", "write", "fsync"]
    assert ("fsync", "sft") in calls[link:]


@pytest.mark.fault(98)
def test_a_failed_last_sync_is_not_success(tmp_path: Path) -> None:
    """The record stays, success is not reported, and a repeat confirms it."""
    failing = True

    def refuse(operation: str, path: Path) -> None:
        if failing and operation == "fsync" and path.name == "sft":
            raise StorageIO("planted", errno=errno.EIO, filename=str(path))

    repo = samples.repo(tmp_path / "store", hook=refuse)
    commit = samples.commit()
    with pytest.raises(StorageIO, match="is published, but its durability is not confirmed") as caught:
        repo.records.link(commit)

    assert (caught.value.errno, caught.value.hint) == (errno.EIO, "repeat the command once the disk works again")
    assert repo.records.read(repo.records.name_of(commit)) == commit
    failing = False
    assert not repo.records.link(commit)


# -- pins ----------------------------------------------------------------------------------------------------------


def test_a_pin_is_written_once_read_and_deleted(repo: Repository) -> None:
    """A pin is whole at any time, belongs to whoever made it first, and is gone once deleted."""
    first, second = samples.pin(), samples.pin(of=samples.record(step=5))
    repo.records.link_pin(first)
    assert repo.records.read_pin("best") == first

    with pytest.raises(AlreadyExists, match="somebody else has just made the pin 'best'"):
        repo.records.link_pin(second)
    assert repo.records.read_pin("best") == first
    assert repo.records.pin_names() == ["best"]

    repo.records.delete_pin("best")
    assert repo.records.pin_names() == []
    for ask in (repo.records.read_pin, repo.records.delete_pin):
        with pytest.raises(NotFound, match="there is no pin 'best'"):
            ask("best")


@pytest.mark.fault(103)
def test_a_damaged_pin_is_found_and_can_be_deleted(repo: Repository) -> None:
    """A torn or renamed pin is damage by name; the others are still read, and it can be deleted unread."""
    repo.records.link_pin(samples.pin("best"))
    repo.records.link_pin(samples.pin("good"))
    path = repo.layout.pin("best")
    data = path.read_bytes()
    for hurt in (b"", data[:-1], bytes([data[0] ^ 1]) + data[1:], repo.layout.pin("good").read_bytes()):
        path.write_bytes(hurt)
        with pytest.raises(IntegrityError):
            repo.records.read_pin("best")
        assert [pin.name for pin in repo.records.readable_pins()] == ["good"]

    repo.records.delete_pin("best")
    assert repo.records.pin_names() == ["good"]


def test_a_store_is_opened_without_writing(repo: Repository) -> None:
    """Opening makes no file and no index: a read-only store stays as it is."""
    before = sorted(repo.layout.root.rglob("*"))
    open_repository(repo.layout.root, Files())

    assert before == sorted(repo.layout.root.rglob("*"))
