"""The collection of a remote: what nothing has named for a day goes, and no push loses a byte to it."""

import sys
from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import Conflict, IntegrityError, InvalidInput, NotFound, Unsupported
from layerstore.history import pushed_to
from layerstore.remote import Bucket
from layerstore.remote.bucket import COLLECTIONS_AT_WORK, COLLECTIONS_ENDED
from tests.remote.at_once import push_and_collect
from tests.remote.conftest import watch_writes
from tests.unit.checkpoints import Checkpoints


def objects(bucket: Bucket) -> set[str]:
    """Return the names of all objects."""
    return {each.name for each in bucket.objects()}


def steps(url: str) -> list[int]:
    """Return the steps that the remote shows, newest first."""
    with layerstore.open(url) as remote:
        return [entry.step for entry in remote.log()]


def test_objects_wait_for_a_day(pushed: Store, bucket: Bucket) -> None:
    """Records go at once, into the trash; the objects that only they name stay until it is a day old."""
    before = objects(bucket)
    planned = pushed.gc(Keep(last=1), remote="origin", dry_run=True)
    assert steps(bucket.url) == [6, 4, 2]

    outcome = pushed.gc(Keep(last=1), remote="origin")

    assert outcome == planned
    assert (len(outcome.removed), outcome.objects.count, outcome.young.count) == (2, 0, 54)
    assert outcome.dropped == ()
    assert steps(bucket.url) == [6]
    assert [entry.step for entry in pushed.log() if entry.commit in pushed_to(pushed.repo)[bucket.url]] == [6]
    assert objects(bucket) == before

    outcome = pushed.gc(remote="origin", grace_seconds=0)

    assert (outcome.trash.count, outcome.objects.count, outcome.young.count) == (2, 54, 0)
    assert outcome.dropped == ("r@2", "r@4")
    assert len(objects(bucket)) == 27
    assert layerstore.open(bucket.url).verify(read_data=True).ok
    assert bucket.listed("trash") == []
    assert [each.name.split("/")[1] for each in bucket.listed("gc")] == ["ended"]


def test_what_was_pushed_again_does_not_leave_with_the_trash(pushed: Store, bucket: Bucket) -> None:
    """Only the copy of its record goes from there: it is named as little as what stays."""
    pushed.gc(Keep(last=1), remote="origin")
    assert pushed.push(refs=["r@4"]).commits == ("r@4",)

    outcome = pushed.gc(remote="origin", grace_seconds=0)

    assert (outcome.trash.count, outcome.dropped, steps(bucket.url)) == (2, ("r@2",), [6, 4])


def test_where_nobody_pushes_all_goes_at_once(pushed: Store, bucket: Bucket) -> None:
    """Also what only the records name that go in the same run; the plan says so beforehand."""
    planned = pushed.gc(Keep(last=1), remote="origin", grace_seconds=0, dry_run=True)

    outcome = pushed.gc(Keep(last=1), remote="origin", grace_seconds=0)

    assert (outcome.objects, outcome.young) == (planned.objects, planned.young)
    assert (outcome.objects.count, outcome.young.count) == (54, 0)
    assert (len(objects(bucket)), bucket.listed("trash")) == (27, [])
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_what_the_trash_names_is_kept_by_age(pushed: Store, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's clock: a day after the record went, not after the object came."""
    day_ns = 24 * 3600 * 10**9
    pushed.gc(Keep(last=1), remote="origin")
    mark = Bucket.mark
    for days, left in ((0.9, 81), (1.1, 27)):
        monkeypatch.setattr(Bucket, "mark", lambda self, name, days=days: mark(self, name) + int(days * day_ns))
        pushed.gc(remote="origin")
        assert len(objects(bucket)) == left
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_pins_are_kept(pushed: Store, bucket: Bucket) -> None:
    """With all that they need."""
    pushed.pin("best", "r@2")
    pushed.push()

    pushed.gc(Keep(last=1), remote="origin", grace_seconds=0)

    assert steps(bucket.url) == [6, 2]
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_what_cannot_be_read_stops_it(pushed: Store, bucket: Bucket) -> None:
    """Nothing is removed: what it needs is unknown."""
    [record] = [each.name for each in bucket.listed("commits") if "/4." in each.name]
    bucket.write(record, lambda: [b"rotten"])
    before = objects(bucket), bucket.listed("commits")

    with pytest.raises(IntegrityError, match=r"r@4.*nothing was removed"):
        pushed.gc(Keep(last=1), remote="origin", grace_seconds=0)

    assert (objects(bucket), bucket.listed("commits")) == before


def test_rules_that_it_does_not_know(pushed: Store) -> None:
    """A run that is not there, and moments."""
    with pytest.raises(NotFound, match="there is no run 's'"):
        pushed.gc(Keep(last=1), runs=["s"], remote="origin")
    with pytest.raises(Unsupported, match="moments"):
        pushed.gc(Keep(drop_optimizer_older_than=1), remote="origin")
    with pytest.raises(Unsupported, match="trash"):
        pushed.gc(empty_trash=True, remote="origin")


def test_no_more_than_was_confirmed(pushed: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """A plan that is out of date removes nothing."""
    plan = pushed.gc(Keep(last=2), remote="origin", dry_run=True)
    saved.into(pushed, 8)
    pushed.push()
    with pytest.raises(Conflict, match="nothing was removed"):
        pushed.gc(Keep(last=2), remote="origin", confirmed=plan)
    assert steps(bucket.url) == [8, 6, 4, 2]


def test_a_push_counts_on_nothing_that_may_go(
    pushed: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that no record of ours names there, and that are half a day old, are sent again."""
    names = [each.name for each in bucket.listed("commits")]
    bucket.remove(names)
    young = pushed.push()
    assert young.objects == 0
    bucket.remove(names)
    mark = Bucket.mark
    monkeypatch.setattr(Bucket, "mark", lambda self, name: mark(self, name) + 13 * 3600 * 10**9)

    old = pushed.push()

    assert old.objects == 81


def test_a_push_that_takes_long_looks_again(
    pushed: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has sent or found long ago may be gone: it is listed again before the record that names it."""
    saved.into(pushed, 8)
    moment, taken = [0.0], list[str]()

    def slow(bucket: Bucket, name: str) -> None:
        if name.startswith("objects/") and not taken:
            taken.append(name)
            moment[0] += 13 * 3600
            bucket.remove([name])  # a collection, after a long time

    monkeypatch.setattr(sys.modules["layerstore.remote.push"], "hours_on", lambda: moment[0])
    watch_writes(monkeypatch, after=slow)

    pushed.push()

    assert taken
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_a_push_that_is_stopped_before_its_record_looks_again(
    pushed: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on after a day, and a collection has taken what it had sent."""
    saved.into(pushed, 8)
    moment, taken, before = [0.0], list[str](), objects(bucket)

    def stopped(bucket: Bucket, name: str) -> None:
        if name.startswith("commits/") and not taken:
            moment[0] += 30 * 3600
            taken.append(min(objects(bucket) - before))
            bucket.remove(taken)

    monkeypatch.setattr(sys.modules["layerstore.remote.push"], "hours_on", lambda: moment[0])
    watch_writes(monkeypatch, before=stopped)

    pushed.push()

    assert taken
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_a_push_beside_a_collection_looks_again(
    pushed: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    It had listed something old, that the push wrote again, and removes it then.

    All that is pushed waits for it together, and no record shows before the push has looked.
    """
    saved.into(pushed, 8, 10, 12)
    before, names = objects(bucket), {each.name for each in bucket.listed("commits")}
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            assert {each.name for each in bucket.listed("commits")} == names
            bucket.remove([min(objects(bucket) - before)])
            bucket.mark(f"{COLLECTIONS_AT_WORK}/0")  # the next one has begun

    monkeypatch.setattr(sys.modules["layerstore.remote.push"].time, "sleep", pause)
    bucket.mark(f"{COLLECTIONS_ENDED}/0")

    assert pushed.push().commits == ("r@8", "r@10", "r@12")

    assert len(pauses) == 2  # the second after it had sent that again
    assert layerstore.open(bucket.url).verify(read_data=True).ok


@pytest.mark.parametrize("grace_seconds", [1.0, 3600.0])
def test_a_grace_that_no_push_knows_is_refused(pushed: Store, bucket: Bucket, grace_seconds: float) -> None:
    """A push counts on a day; where nobody pushes, none is needed."""
    before = bucket.listed("commits")
    with pytest.raises(InvalidInput, match="pushes and saves count on 24 hours"):
        pushed.gc(Keep(last=1), remote="origin", grace_seconds=grace_seconds)
    assert bucket.listed("commits") == before


@pytest.mark.full
@pytest.mark.sample(1)
def test_pushes_and_collections_at_once(
    store: Store, saved: Checkpoints, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a day is nine seconds: a collection may take a commit, but never half of it."""
    push_and_collect(store, saved, url, tmp_path, monkeypatch, grace_seconds=9.0)


def test_another_stores_remote_is_not_collected(pushed: Store, url: str, tmp_path: Path) -> None:
    """One wrong prefix must not trim somebody else's bucket."""
    with layerstore.init(tmp_path / "another") as another, pytest.raises(Conflict, match="nothing was removed"):
        another.gc(Keep(last=1), remote=url)


def test_a_store_is_not_made_in_a_folder_called_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that was made from a URL is a slip."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="is a URL"):
        layerstore.init(Path("s3://bucket/prefix"))
    assert not list(tmp_path.iterdir())
