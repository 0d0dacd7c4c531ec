"""A store in a bucket that is saved to: ingests, pins and collections without a store on a disk."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.disk import hours_on
from layerstore.errors import (
    AlreadyExists,
    IntegrityError,
    Locked,
    NoStore,
    NotFound,
    Overtaken,
    StorageIO,
    Unsupported,
)
from layerstore.format import ref_of
from layerstore.limits import REMOTE_MOMENT_SECONDS
from layerstore.live.ranks import store_if_there
from layerstore.parts import Part
from layerstore.remote import Bucket, RemoteNotice, saving
from layerstore.remote.bucket import COLLECTIONS_AT_WORK, Chunks
from layerstore.storage import ObjectWriter
from tests.faults.harness import flip, seeded
from tests.remote.at_once import save_and_collect
from tests.remote.conftest import watch_writes
from tests.unit.checkpoints import Checkpoints

HALF_A_DAY = 12 * 3600

collect_room = sys.modules["layerstore.remote.collect"]  # the package's attribute of this name is the function


@pytest.fixture
def there(url: str) -> Iterator[Store]:
    """Return a store in a bucket, with nothing in it."""
    with layerstore.init(url) as made:
        yield made


@pytest.fixture
def in_a_folder(tmp_path: Path) -> Iterator[Store]:
    """Return a store in a bucket that is a folder, whose files can be looked at."""
    with layerstore.init(f"file://{tmp_path}/remote") as made:
        yield made


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names that are written, in order."""
    names: list[str] = []
    watch_writes(monkeypatch, before=lambda _, name: names.append(name))
    return names


def only(folder: str, names: list[str]) -> list[str]:
    """Return those of *names* below *folder*."""
    return [name for name in names if name.startswith(f"{folder}/")]


def old(folder: Path, seconds: float = HALF_A_DAY + 60) -> None:
    """Let everything below *folder* be older."""
    for path in folder.rglob("*"):
        when = time.time() - seconds
        os.utime(path, (when, when))


def test_ingests_make_the_commits_of_a_disk(there: Store, store: Store, saved: Checkpoints, url: str) -> None:
    """Under parity, every commit has the id that a store on a disk gives it, and composes to the same bytes."""
    for each in (there, store):
        saved.into(each, 2, 4, 6, policy="parity")
        each.pin("best", "r@4")

    assert [of.commit for of in there.log("r")] == [of.commit for of in store.log("r")]
    with layerstore.open(url) as again:
        assert [of.commit for of in again.log("r")] == [of.commit for of in store.log("r")]
        assert again.verify(read_data=True).ok
        assert [pin.name for pin in again.pins()] == ["best"]


def test_a_record_comes_last_and_blobs_after_their_objects(
    in_a_folder: Store, saved: Checkpoints, sent: list[str]
) -> None:
    """Whenever an ingest dies, nothing in the bucket names what is not there."""
    saved.into(in_a_folder, 2)

    assert sent[-1].startswith("commits/r/2.")
    blobs = {in_a_folder.repo.layout.object_name(of.id) for of in _record(in_a_folder).blobs}
    objects = only("objects", sent)
    assert set(objects[-len(blobs) :]) == blobs


def _record(store: Store) -> layerstore.model.CommitRecord:
    return store.repo.catalog.commit(store.repo.catalog.view("r").visible[-1].name).record


def test_the_same_again_sends_nothing(in_a_folder: Store, saved: Checkpoints, sent: list[str]) -> None:
    """What the bucket has is read there, and not sent once more; the commit is the one before."""
    saved.into(in_a_folder, 2)
    before = len(only("objects", sent))

    again = in_a_folder.ingest(saved(2), run="r")

    assert (again.is_new, again.objects_new, again.bytes_new) == (False, 0, 0)
    assert len(only("objects", sent)) == before


def test_a_damaged_object_is_replaced(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """An ingest of the same reads what is there, and sends again what has rotted."""
    saved.into(in_a_folder, 2)
    victim = max((tmp_path / "remote" / "objects").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)

    assert in_a_folder.ingest(saved(2), run="r").objects_healed == 1
    assert in_a_folder.verify(read_data=True).ok


def test_what_a_killed_save_left_is_used_while_it_is_young(
    in_a_folder: Store, saved: Checkpoints, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that no record names are relied on for half a day, and then sent once more."""
    with pytest.MonkeyPatch.context() as patch:
        _fail_at(patch, "commits/")
        with pytest.raises(StorageIO):
            saved.into(in_a_folder, 2)
    first = only("objects", sent)
    sent.clear()
    with pytest.MonkeyPatch.context() as patch:
        _fail_at(patch, "commits/")
        with pytest.raises(StorageIO):
            saved.into(in_a_folder, 2)
    assert only("objects", sent) == []

    old(Path(in_a_folder.repo.name.removeprefix("file://"), "objects"))
    saved.into(in_a_folder, 2)

    assert sorted(only("objects", sent)) == sorted(first)


def _fail_at(patch: pytest.MonkeyPatch, prefix: str) -> None:
    write = Bucket.write

    def failing(self: Bucket, name: str, chunks: Chunks) -> None:
        if name.startswith(prefix):
            raise StorageIO("the server is full", errno=None, filename=self.url)
        write(self, name, chunks)

    patch.setattr(Bucket, "write", failing)


@pytest.mark.parametrize("policy", ["full", "parity"])
def test_what_a_record_names_is_relied_on_however_old(
    policy: str, in_a_folder: Store, saved: Checkpoints, sent: list[str]
) -> None:
    """An old object is not sent again if a commit has it; nor is an inherited layer."""
    saved.into(in_a_folder, 2, policy=policy)
    old(Path(in_a_folder.repo.name.removeprefix("file://"), "objects"))
    sent.clear()

    with layerstore.open(in_a_folder.repo.name) as again:
        again.ingest(saved(4, seed=2), run="r", policy=policy)

    assert all(name in sent for name in only("commits", sent))
    kinds = {
        len(Path(in_a_folder.repo.name.removeprefix("file://"), name).read_bytes()) for name in only("objects", sent)
    }
    assert max(kinds) < 20_000  # what describes the save, and no weights


def test_what_the_bucket_has_lost_is_not_inherited(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """A record proves nothing: a save asks for each blob that it inherits, whatever the cache still has."""
    saved.into(in_a_folder, 2, policy="parity")
    in_a_folder.compose("r").write(tmp_path / "out")  # now the cache has them
    for entry in _record(in_a_folder).layers:
        (tmp_path / "remote" / in_a_folder.repo.layout.object_name(entry.version.id)).unlink()

    try:
        saved.into(in_a_folder, 4, policy="parity")
    except Overtaken:
        assert [of.step for of in in_a_folder.log("r")] == [2]
    costs = {cost.holder for damage in in_a_folder.verify().damaged for cost in damage.costs}
    assert costs == {"r@2"}


def test_an_old_commit_can_be_pinned(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Its record names everything, however old, also where it is not the newest; and the pin can be deleted."""
    saved.into(in_a_folder, 2, 4)
    old(tmp_path / "remote" / "objects")

    in_a_folder.pin("early", "r@2")

    assert [pin.name for pin in in_a_folder.pins()] == ["early"]
    assert in_a_folder.delete_pin("early")
    assert in_a_folder.pins() == []


def test_a_refresh_that_fails_makes_nothing_valid(
    in_a_folder: Store, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read half a day ago is not relied on because the server did not answer meanwhile."""
    saved.into(in_a_folder, 2, policy="parity")
    old(tmp_path / "remote" / "objects")
    reliance = in_a_folder.repo.objects.reliance  # type: ignore[attr-defined] # of a mirror
    version = _record(in_a_folder).layers[0].version
    assert reliance.has(version)
    clock = hours_on
    monkeypatch.setattr(saving, "hours_on", lambda: clock() + HALF_A_DAY + 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reliance, "_refresh", _fails)
        with pytest.raises(StorageIO):
            reliance.has(version)
    next((tmp_path / "remote" / "commits" / "r").iterdir()).unlink()

    assert not reliance.has(version)


def _fails() -> None:
    raise StorageIO("it does not answer", errno=None, filename="the bucket")


def test_another_hosts_commits_are_seen(
    in_a_folder: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was opened long ago reads the records again before it saves."""
    saved.into(in_a_folder, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAYERSTORE_CACHE_DIR", f"{saved.folder}/other-cache")
        with layerstore.open(in_a_folder.repo.name) as other:
            saved.into(other, 4, 6)

    saved.into(in_a_folder, 8)

    rows = in_a_folder.repo.catalog.view("r").rows.values()
    assert sorted((of.step, of.save_number) for of in rows) == [(2, 0), (4, 1), (6, 2), (8, 3)]


@pytest.mark.timeout(60)
def test_a_failed_upload_ends_all_that_wait(
    in_a_folder: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for room is told."""
    monkeypatch.setattr(saving, "REMOTE_FLIGHT_BYTES", 20_000)
    _fail_at(monkeypatch, "objects/")
    with pytest.raises(StorageIO, match="the server is full"):
        in_a_folder.ingest(saved(2, hidden=64, layers=8), run="r")


def test_a_failed_upload_leaves_nothing_in_memory(in_a_folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may go on for days without a collection of garbage."""
    _fail_at(monkeypatch, "objects/")
    gc.collect()
    gc.disable()
    try:
        writer = _failed(in_a_folder)
        assert writer() is None
    finally:
        gc.enable()


def _failed(store: Store) -> weakref.ref[ObjectWriter]:
    """Return a writer whose uploads have failed, if it is still there."""
    with store.repo.writer() as writer:
        for number in range(9):
            data = bytes([number]) * 100_000
            with suppress(StorageIO):
                writer.put(data, ref_of(data))
        with suppress(StorageIO):
            writer.publish()
        return weakref.ref(writer)


def test_a_collection_at_work_is_waited_for(
    in_a_folder: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A collection may remove what it had listed as old: a save looks once more, and says if something is gone."""
    Bucket(in_a_folder.repo.name).mark(f"{COLLECTIONS_AT_WORK}/{'0' * 16}")
    objects = tmp_path / "remote" / "objects"

    def collect(seconds: float) -> None:
        waited.append(seconds)
        next(path for path in objects.rglob("*") if path.is_file()).unlink()

    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", collect)

    with pytest.raises(Overtaken, match="was removed meanwhile"):
        saved.into(in_a_folder, 2)

    assert waited == [2 * REMOTE_MOMENT_SECONDS]
    assert in_a_folder.runs() == []


@pytest.mark.parametrize(("hours", "is_saved"), [(4, True), (19, False)])
@pytest.mark.parametrize("at", ["objects/", "commits/"])
def test_a_save_that_was_suspended_looks_again(
    at: str, hours: int, is_saved: bool, in_a_folder: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has uploaded may have become old meanwhile, before the record or after it; then nothing is visible."""
    clock, asleep = hours_on, [0.0]
    saved.into(in_a_folder, 2, run="earlier")  # the server's clock is known
    monkeypatch.setattr(saving, "hours_on", lambda: clock() + asleep[0])
    monkeypatch.setattr(Bucket, "now_ns", lambda _: time.time_ns() + int(asleep[0] * 1e9))
    watch_writes(monkeypatch, after=lambda _, name: asleep.__setitem__(0, 3600.0 * hours * name.startswith(at)))

    if is_saved:
        saved.into(in_a_folder, 4)
    else:
        with pytest.raises(Overtaken, match="removed"):
            saved.into(in_a_folder, 4)

    assert in_a_folder.runs() == (["earlier", "r"] if is_saved else ["earlier"])


def test_a_replaced_commit_goes_to_the_trash(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """As on a disk, the new commit hides the old one, whose record moves away."""
    saved.into(in_a_folder, 2)
    old_id = _record(in_a_folder).states[0].id
    in_a_folder.ingest(saved(2, seed=9), run="r", replace=True)

    assert _record(in_a_folder).states[0].id != old_id or len(in_a_folder.log("r")) == 1
    assert len(list((tmp_path / "remote" / "trash").rglob("2.*"))) == 1
    assert len(list((tmp_path / "remote" / "commits").rglob("2.*"))) == 1


def test_its_own_collection(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """A store in a bucket is collected as itself; parts that a dead job has left go with what is old."""
    saved.into(in_a_folder, 2, 4, 6)
    part = tmp_path / "remote" / "parts" / ("0" * 32) / "3.1"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"of a job that is over")
    old(part.parent, seconds=1)  # the clock of a filesystem moves in steps

    gone = in_a_folder.gc(Keep(last=1), grace_seconds=0)

    assert [of.step for of in gone.removed] == [4, 2]
    assert [of.step for of in in_a_folder.log("r")] == [6]
    assert not part.exists()
    assert in_a_folder.verify(read_data=True).ok


def test_another_store_in_its_place_is_noticed(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """A record never goes to a bucket that has become another store's."""
    (tmp_path / "remote" / "store.json").unlink()
    layerstore.init(in_a_folder.repo.name).close()

    with pytest.raises(IntegrityError, match="when it was opened"):
        saved.into(in_a_folder, 2)

    assert list((tmp_path / "remote" / "commits").rglob("2.*")) == []


def test_a_missing_bucket_is_not_an_empty_one(s3: str) -> None:
    """A mistyped bucket is not a place where training starts from scratch."""
    assert store_if_there(s3) is None
    with pytest.raises(NoStore, match="there is no such bucket"):
        store_if_there(s3.replace("bucket-", "typo-"))


def test_it_is_made_once(there: Store, url: str) -> None:
    """A bucket that holds a store is not made another one."""
    with pytest.raises(AlreadyExists, match="is a store already"):
        layerstore.init(url)


def test_a_repair_needs_a_disk(in_a_folder: Store, saved: Checkpoints) -> None:
    """What the bucket has lost is sent by a store that has it."""
    saved.into(in_a_folder, 2)
    with pytest.raises(Unsupported):
        in_a_folder.repair()


def test_a_dropped_commit_comes_back(there: Store, saved: Checkpoints, url: str) -> None:
    """Any host may bring it back; a second commit of its step is named by its id."""
    saved.into(there, 2, 4)
    commit = there.show("r@4").commit

    dropped = there.drop(commit[:8])
    assert (dropped.step, dropped.tip) == (4, "r@2")
    assert [entry.step for entry in there.log("r")] == [2]
    with layerstore.open(url) as other:
        assert [each.commit.id for each in other.dropped("r")] == [commit]
        assert other.verify(read_data=True).orphans == 0
        assert other.undrop("r@4").id == commit
        assert other.dropped("r") == []
        with pytest.raises(NotFound, match="is not in the trash"):
            other.undrop("r@4")
        assert other.verify(read_data=True).ok
    with layerstore.open(url) as third:
        assert [entry.step for entry in third.log("r")] == [4, 2]


def test_what_is_dropped_is_held_for_a_day(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Bringing it back writes its record first where collections look, and then where everybody does."""
    bucket = tmp_path / "remote"
    saved.into(in_a_folder, 2, 4)
    old(bucket / "objects", 25 * 3600)
    commit = in_a_folder.drop("r@4").commit
    in_a_folder.gc()
    old(bucket / "trash", 23 * 3600)
    in_a_folder.gc()
    for mark in (bucket / "gc").rglob("*"):
        os.utime(mark, (time.time() - 60,) * 2)

    assert in_a_folder.undrop("r@4").id == commit
    assert in_a_folder.verify(read_data=True).ok

    in_a_folder.drop("r@4")
    old(bucket / "trash", 25 * 3600)
    assert in_a_folder.gc().trash.count == 1
    with pytest.raises(NotFound):
        in_a_folder.undrop("r@4")
    assert in_a_folder.verify(read_data=True).ok


def test_nothing_comes_back_beside_a_collection(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """It may have found the record too old to keep anything for it; afterwards the same command works."""
    saved.into(in_a_folder, 2, 4)
    in_a_folder.drop("r@4")
    mark = f"{COLLECTIONS_AT_WORK}/{'0' * 16}"
    Bucket(in_a_folder.repo.name).mark(mark)

    with pytest.raises(Locked, match="is at work"):
        in_a_folder.undrop("r@4")
    assert [entry.step for entry in in_a_folder.log("r")] == [2]

    (tmp_path / "remote" / mark).unlink()
    in_a_folder.undrop("r@4")
    assert [entry.step for entry in in_a_folder.log("r")] == [4, 2]


def test_what_collections_took_does_not_come_back(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """An undrop looks for every object; the commit stays in the trash, which is no damage."""
    seeded("collected").choice(dropped_of_its_own(in_a_folder, saved, tmp_path)).unlink()

    with pytest.raises(Overtaken, match="cannot come back"):
        in_a_folder.undrop("r@6")

    assert [each.commit.record.step for each in in_a_folder.dropped()] == [6]
    assert in_a_folder.verify(read_data=True).ok


def test_what_only_dropped_commits_need_is_read(in_a_folder: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """No collection leaves a damaged object: the bucket has lost it for the undrop, too."""
    path = seeded("damaged").choice(dropped_of_its_own(in_a_folder, saved, tmp_path))
    flip(path)

    verdict = in_a_folder.verify(read_data=True)

    assert [damage.id for damage in verdict.damaged] == [path.name]
    assert next(cost.holder for cost in verdict.damaged[0].costs).startswith("r@6 (commit ")


def dropped_of_its_own(store: Store, saved: Checkpoints, folder: Path) -> list[Path]:
    """Save three steps and drop the last one; return the objects that only it needs."""
    objects = folder / "remote" / "objects"
    saved.into(store, 2, 4)
    others = {path for path in objects.rglob("*") if path.is_file()}
    store.ingest(saved(6, seed=6), run="r")
    store.drop("r@6")
    return sorted(path for path in objects.rglob("*") if path.is_file() and path not in others)


def test_a_damaged_record_is_given_up(
    in_a_folder: Store, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it blocks collections; it lies in the trash for a day."""
    saved.into(in_a_folder, 2, 4)
    path = next((tmp_path / "remote" / "commits" / "r").glob("4.*"))
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setenv("LAYERSTORE_CACHE_DIR", str(tmp_path / "other-cache"))
    with layerstore.open(in_a_folder.repo.name) as store:
        with pytest.raises(IntegrityError):
            store.gc()
        assert len(store.give_up("r@4")) == 1
        assert [entry.step for entry in store.log("r")] == [2]
        assert store.gc().trash.count == 0
        damaged = tmp_path / "remote" / "trash" / "damaged" / "commits" / "r" / path.name
        assert damaged.exists()
        old(tmp_path / "remote" / "trash", 25 * 3600)
        assert store.gc().trash.count == 1
        assert not damaged.exists()


def test_what_comes_to_the_trash_again_stays_there(
    in_a_folder: Store, saved: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection that had found an older copy of a record there looks at its time once more."""
    saved.into(in_a_folder, 2, 4)
    record = next((tmp_path / "remote" / "commits" / "r").glob("4.*"))
    copy = tmp_path / "remote" / "trash" / "commits" / "r" / record.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(record.read_bytes())
    old(tmp_path / "remote" / "trash", 25 * 3600)
    expired = collect_room._trash

    def and_dropped(*asked: Any) -> Any:
        found = expired(*asked)
        with layerstore.open(in_a_folder.repo.name) as other:
            other.drop("r@4")
        return found

    monkeypatch.setattr(collect_room, "_trash", and_dropped)
    in_a_folder.gc()

    assert copy.exists()


def test_what_ends_a_save_is_tried_once(in_a_folder: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has failed already: to say so, and to remove parts, is not a reason to hold the next save."""
    parts, tried = in_a_folder.repo.parts, list[str]()
    client = in_a_folder.repo.objects.reliance.bucket._client  # type: ignore[attr-defined] # of a mirror

    def fail(doing: str) -> Callable[..., None]:
        def failing(*_: object) -> None:
            tried.append(doing)
            raise OSError("busy")

        return failing

    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(client, "put", fail("write"))
    monkeypatch.setattr(client, "delete", fail("remove"))
    failed = Part(
        session="0" * 32,
        save=1,
        rank=0,
        agreement="",
        layers=(),
        state=None,
        bytes_new=0,
        bytes_reused=0,
        failure="it failed",
    )
    with pytest.raises(StorageIO, match="busy"):
        parts.publish(failed)
    with pytest.raises(StorageIO, match="busy"):
        parts.remove("0" * 32, 1, world_size=2)

    assert tried == ["write", "remove"]


def test_memory_is_bounded(in_a_folder: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the server is, no more than a few objects wait for it."""
    monkeypatch.setattr(saving, "REMOTE_FLIGHT_BYTES", 40_000)
    taken: list[int] = []
    take = saving._MemoryBudget.take

    def noted(self: saving._MemoryBudget, size_bytes: int) -> None:
        take(self, size_bytes)
        taken.append(self._taken)

    monkeypatch.setattr(saving._MemoryBudget, "take", noted)
    watch_writes(monkeypatch, before=lambda *_: time.sleep(0.01))

    in_a_folder.ingest(saved(2, hidden=32), run="r")

    largest = max(path.stat().st_size for path in Path(in_a_folder.repo.name[7:], "objects").rglob("*"))
    assert max(taken) <= max(40_000, largest)


def test_a_server_that_is_down_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made, and the error says what did not answer."""
    monkeypatch.setattr("layerstore.remote.bucket.REMOTE_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.warns(RemoteNotice), pytest.raises(StorageIO, match=r"cannot read store\.json"):
        layerstore.init("s3://bucket/pre")


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*trying again in:layerstore.remote.RemoteNotice")  # moto answers 500 now and then
def test_saves_and_collections_at_once(
    saved: Checkpoints, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a day is nine seconds: a collection takes no object that a save has found there."""
    save_and_collect(saved, url, tmp_path, monkeypatch, grace_seconds=9.0)
