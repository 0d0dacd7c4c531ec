"""What a bucket says is not trusted more than it must be: nothing is lost here, or there, for what is missing there."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.disk import hours_on
from layerstore.errors import AlreadyExists, Conflict, IntegrityError, StorageIO
from layerstore.limits import RECORD_BYTES_MAX
from layerstore.remote import Bucket
from layerstore.remote.identity import identity_of
from tests.remote.conftest import watch_writes
from tests.unit.checkpoints import Checkpoints


@pytest.fixture
def records(pushed: Store, bucket: Bucket) -> dict[int, str]:
    """Return the names of the records in the bucket, by step."""
    names = pushed.repo.records.names("r")
    return {name.step: f"commits/r/{name.step}.{name.id}" for name in names}


def steps(store: Store | str) -> list[int]:
    """Return what shows, oldest first."""
    with layerstore.open(store.path if isinstance(store, Store) else store) as opened:
        return sorted(entry.step for entry in opened.log())


# -- a collection there ----------------------------------------------------------------------------------------------


def test_a_folder_that_the_server_does_not_know_is_not_empty(
    pushed: Store, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that answers 404 for once must not make everything unneeded."""
    client: Any = type(bucket._client)
    asked, listed = list[str](), client.list
    first = 3 if bucket.url.startswith("file") else 2  # the folder is searched for links before

    def at_times(self: object, folder: str) -> object:
        asked.append(folder)
        if folder == "commits" and asked.count("commits") == first:
            raise FileNotFoundError("404 Not Found")
        return listed(self, folder)

    with monkeypatch.context() as patch:
        patch.setattr(client, "list", at_times)
        with pytest.raises(StorageIO, match="cannot list commits"):
            pushed.gc(remote="origin", grace_seconds=0)
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_a_cache_that_is_emptied_meanwhile_hides_no_record(
    pushed: Store, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is a cache: a cleaner may take it at any time, while a collection marks."""
    module = sys.modules["layerstore.remote.collect"]
    named = module._named

    def emptied(*args: object, **options: object) -> object:
        for path in (tmp_path / "cache").rglob("commits/*/*"):
            path.unlink()
        return named(*args, **options)

    monkeypatch.setattr(module, "_named", emptied)
    assert pushed.gc(remote="origin", grace_seconds=0).objects.count == 0
    assert steps(bucket.url) == [2, 4, 6]
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_thousands_are_removed_in_time_or_not(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each is a request of its own, the clock is looked at in between."""
    names = [f"objects/aa/{number}" for number in range(450)]
    for name in names:
        bucket.write(name, lambda: [b""])
    now = iter([0.0, 1.0, 5.0])
    with monkeypatch.context() as patch:
        patch.setattr("layerstore.remote.bucket.hours_on", lambda: next(now))
        assert not bucket.remove(names, until=2.0)
    assert len(bucket.listed("objects")) == 50
    assert bucket.remove(names, until=hours_on() + 60)
    assert bucket.listed("objects") == []


def test_some_of_many_may_be_gone_already(bucket: Bucket) -> None:
    """Two collections at once remove the same: whichever comes later removes the rest."""
    for number in range(50):
        bucket.write(f"objects/aa/{number}", lambda: [b""])
    names = [f"objects/aa/{number}" for number in (0, 99, *range(1, 25), 98, *range(25, 50))]
    assert bucket.remove(names)
    assert bucket.listed("objects") == []


@pytest.mark.fault(115)
@pytest.mark.parametrize("text", [None, b"", b"rotten", b"[" * 1000, bytes(RECORD_BYTES_MAX + 1)])
def test_a_lost_identity_is_put_back(
    pushed: Store, bucket: Bucket, tmp_path: Path, saved: Checkpoints, text: bytes | None
) -> None:
    """By a store that has all of its commits; until then nobody takes it for empty, and no other store takes it."""
    if text is None:
        bucket.remove(["store.json"])
    else:
        bucket.write("store.json", lambda: [text])
    for use in (lambda: layerstore.open(bucket.url), lambda: pushed.push(bucket.url)):
        with pytest.raises(IntegrityError, match=r"store\.json") as told:
            use()
        assert f"layerstore repair --remote {bucket.url}" in (told.value.hint or "")
    other = layerstore.init(tmp_path / "other")
    saved.into(other, 2)
    with pytest.raises(IntegrityError, match="does not have"):
        other.repair(remote=bucket.url)

    planned = pushed.repair(remote=bucket.url, dry_run=True)
    assert bucket.size("store.json") == (None if text is None else len(text))
    assert pushed.repair(remote=bucket.url).fetched == planned.fetched
    assert [each.path for each in planned.fetched] == ["store.json"]
    assert layerstore.open(bucket.url).verify(read_data=True).ok


@pytest.mark.fault(115)
def test_what_a_damaged_identity_says_of_features_is_kept(pushed: Store, bucket: Bucket) -> None:
    """A layerstore that does not know one must not write there."""
    data = bucket.read("store.json", size_bytes_max=RECORD_BYTES_MAX) or b""
    bucket.write("store.json", lambda: [data.replace(b'"flags": []', b'"flags": ["new"]')])
    pushed.repair(remote=bucket.url)
    found = identity_of(bucket)
    assert found is not None
    assert found.flags == ("new",)


# -- what counts as pushed -------------------------------------------------------------------------------------------


def test_a_record_that_is_cut_short_there_is_sent_again(pushed: Store, bucket: Bucket, records: dict[int, str]) -> None:
    """And until then nothing here goes because it is there."""
    bucket.write(records[2], lambda: [b""])
    pushed.gc(Keep(last=1), pushed_to="origin", grace_seconds=0)
    assert steps(pushed) == [2, 6]

    assert pushed.push().commits == ("r@2",)
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_another_stores_bucket_keeps_nothing_for_this_one(
    pushed: Store, saved: Checkpoints, tmp_path: Path, url: str
) -> None:
    """Though the same checkpoint is the same commit there."""
    other = layerstore.init(tmp_path / "other")
    saved.into(other, 2, 4)
    with pytest.raises(Conflict, match="another store"):
        other.gc(Keep(last=1), pushed_to=url)
    with pytest.raises(Conflict, match="another store"):
        other.repair(remote=url)
    assert steps(other) == [2, 4]


def test_what_a_commit_inherits_is_looked_at(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """An object of its base that is lost there is sent again with it."""
    saved.into(store, 2)
    store.push(bucket.url)
    bucket.remove([each.name for each in bucket.objects()][:5])
    saved.into(store, 4, policy="parity")

    store.push(bucket.url)

    with layerstore.open(bucket.url) as remote:
        assert not [each for each in remote.verify().damaged if "r@4" in each.needed_by]


# -- one thing that is wrong -----------------------------------------------------------------------------------------


def test_a_push_sends_all_that_is_sound(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """A damaged object and a damaged record cost their own commits; a pin that means something else, only that."""
    saved.into(store, 2, 4, 6, 8)
    store.pin("best", "r@6")
    store.pin("last", "r@8")
    layer = store.repo.catalog.commit(store.repo.records.names("r")[0]).record.layers[0]
    path = store.repo.layout.object(store.repo.version_of(layer).objects[0].id)
    path.write_bytes(bytes(path.stat().st_size))
    record = next((store.path / "commits/r").glob("4.*"))
    record.write_bytes(b"rotten")

    with pytest.raises(IntegrityError, match=r"not sent: r@[24], r@[24]; everything else was"):
        store.push(bucket.url)

    assert steps(bucket.url) == [6, 8]
    assert {pin.name for pin in layerstore.open(bucket.url).pins()} == {"best", "last"}


def test_a_pin_that_was_sent_meanwhile_stays(
    pushed: Store, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two pushers with one name for two things, one is told."""
    clone = layerstore.clone(bucket.url, tmp_path / "clone")
    pushed.pin("best", "r@2")
    clone.pin("best", "r@4")
    once = threading.Lock()

    def meanwhile(_: Bucket, name: str) -> None:
        if name.startswith("gc/clock") and once.acquire(blocking=False):
            clone.push()

    watch_writes(monkeypatch, before=meanwhile)
    with pytest.raises(AlreadyExists, match=r"'best' refers to r@4 in .*not sent: pin best"):
        pushed.push()
    [pin] = layerstore.open(bucket.url).pins()
    assert pin.base == clone.pins()[0].base


def test_a_clone_names_what_is_rotten_there(
    pushed: Store, bucket: Bucket, records: dict[int, str], tmp_path: Path
) -> None:
    """A record and a pin that cannot be read; all else comes."""
    pushed.pin("best", "r@2")
    pushed.push()
    for name in (records[4], "pins/best"):
        bucket.write(name, lambda: [b"rotten"])

    with pytest.raises(IntegrityError, match="not fetched: r@4, pin best; everything else was"):
        layerstore.clone(bucket.url, tmp_path / "clone")

    with layerstore.open(tmp_path / "clone") as clone:
        assert sorted(entry.step for entry in clone.log()) == [2, 6]
    pushed.repair(remote="origin")
    with layerstore.clone(bucket.url, tmp_path / "clone") as clone:
        assert len(clone.log()) == 3
