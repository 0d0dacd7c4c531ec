"""A bucket that has lost objects, by a lifecycle rule, say: its records and pins are still there."""

from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import IntegrityError
from layerstore.history import PushedNotice
from layerstore.limits import REMOTE_REQUESTS_MAX
from layerstore.progress import Silent
from layerstore.remote import Bucket, push
from layerstore.remote.bucket import OBJECT_FOLDERS
from layerstore.remote.folder import Listed
from tests.live.saver.test_collector import collect
from tests.remote.conftest import watch_writes
from tests.unit.checkpoints import Checkpoints, snapshot


@pytest.fixture
def pushed(store: Store, saved: Checkpoints, url: str) -> Store:
    """Return a store of three steps and a mixture, whose remote has it all."""
    saved.into(store, 2, 4, 6)
    store.compose("r@6", policy="parity").pin("mixed")
    store.remotes.add("origin", url)
    store.push()
    return store


def names_of(store: Store, step: int, kind: str) -> list[str]:
    """Return the bucket's names of the versions, the states or the tensors of *step*."""
    [name] = [name for name in store.repo.records.names("r") if name.step == step]
    record = store.repo.catalog.commit(name).record
    versions = [entry.version for entry in record.layers]
    found = {
        "version": [ref.id for ref in versions],
        "state": [ref.id for ref in record.states],
        "tensor": [each.id for ref in versions for each in store.repo.version(ref).objects],
    }
    return [store.repo.layout.object_name(each) for each in found[kind]]


@pytest.mark.fault(119)
@pytest.mark.parametrize("kind", ["version", "state", "tensor"])
@pytest.mark.parametrize("how", ["gone", "cut short"])
def test_a_commit_of_which_the_bucket_has_lost_something_stays_here(
    pushed: Store, bucket: Bucket, kind: str, how: str
) -> None:
    """Its record alone is not a second copy; once a push has sent the rest again, it may go."""
    victim = names_of(pushed, 2, kind)[0]
    bucket.remove([victim]) if how == "gone" else bucket.write(victim, lambda: [b"short"])

    with pytest.warns(PushedNotice, match="has the record of r@2, but not all that it names"):
        kept = pushed.gc(Keep(last=1), pushed_to="origin", grace_seconds=0)

    assert [fate.step for fate in kept.removed] == [4]
    assert [fate.kept_by for fate in kept.commits if fate.step == 2] == [("not pushed yet",)]
    assert "r@2" in pushed.push().commits
    assert [fate.step for fate in pushed.gc(Keep(last=1), pushed_to="origin", grace_seconds=0).removed] == [2]
    assert layerstore.open(bucket.url).verify(read_data=True).ok


@pytest.mark.fault(119)
def test_a_commit_that_the_bucket_has_without_moments_stays_here(pushed: Store, url: str, tmp_path: Path) -> None:
    """Trimmed in a clone and pushed from there: the bucket's next collection removes the one that has them."""
    layerstore.clone(url, tmp_path / "clone").close()
    with layerstore.open(tmp_path / "clone") as other:
        other.gc(Keep(drop_optimizer_older_than=1), grace_seconds=0)
        other.push(url)

    kept = pushed.gc(Keep(last=1), pushed_to="origin", grace_seconds=0)

    assert kept.removed == []
    assert {fate.step for fate in kept.commits if "not pushed yet" in fate.kept_by} == {2, 4}


@pytest.mark.fault(119)
def test_nothing_goes_for_a_bucket_that_has_lost_everything_but_records(pushed: Store, bucket: Bucket) -> None:
    """Nor for one without its store.json, which nobody can open."""
    bucket.remove([each.name for each in bucket.objects()])
    before = snapshot(pushed)
    with pytest.warns(PushedNotice, match=r"has the record of r@\d, but not all"):
        assert pushed.gc(Keep(last=1), pushed_to="origin", grace_seconds=0).removed == []
    pushed.push()
    bucket.remove(["store.json"])

    assert pushed.gc(Keep(last=1), pushed_to="origin", grace_seconds=0).removed == []

    assert snapshot(pushed) == before


@pytest.mark.fault(119)
def test_a_push_sends_again_what_the_bucket_has_lost(pushed: Store, bucket: Bucket, tmp_path: Path) -> None:
    """And nothing else; also of what only a pin names, and of what several commits share."""
    lost = [names_of(pushed, step, kind)[0] for step in (2, 4) for kind in ("version", "state", "tensor")]
    bucket.remove(lost)

    found = pushed.push()

    assert (found.commits, found.pins, found.objects) == (("r@2", "r@4"), ("mixed",), len(set(lost)))
    assert pushed.push().commits == ()
    with layerstore.clone(bucket.url, tmp_path / "clone") as clone:
        assert snapshot(clone) == snapshot(pushed)


@pytest.mark.fault(119)
def test_a_push_of_a_pin_sends_again_what_only_the_pin_names(store: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """Its commit may be long gone."""
    saved.into(store, 2, 4)
    store.pin("best", "r@2")
    store.gc(Keep(last=1))
    store.push(bucket.url)
    record = store.repo.records.read_pin("best").record
    bucket.remove([store.repo.layout.object_name(record.layers[0].version.id)])

    assert store.push(bucket.url).pins == ("best",)

    assert layerstore.open(bucket.url).verify(read_data=True).ok


@pytest.mark.fault(119)
def test_what_cannot_be_compared_is_not_called_pushed(pushed: Store, bucket: Bucket) -> None:
    """A version that is damaged here: nobody knows what the bucket should have of it."""
    path = pushed.path / names_of(pushed, 2, "version")[0]
    path.write_bytes(bytes(path.stat().st_size))
    bucket.remove([names_of(pushed, 4, "state")[0]])

    with pytest.raises(IntegrityError, match="not sent: r@2; everything else was"):
        pushed.push()
    pushed.repair(sources=[bucket.url], read_data=True)
    assert pushed.push().commits == ()


@pytest.mark.fault(119)
def test_a_running_job_sends_again_what_the_bucket_has_lost(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Its helper pushes first, so the bucket is whole again before anything goes here."""
    url = f"file://{tmp_path}/bucket"
    saved.into(store, 2, 4)
    store.push(url)
    Bucket(url).remove(names_of(store, 2, "tensor"))

    collect(store, Keep(last=1), push=url)

    assert [entry.step for entry in store.log()] == [4]
    assert layerstore.open(url).verify(read_data=True).ok


def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the folders that are listed and the names that are looked at, as they are asked for."""
    found, listed, look = list[str](), Bucket.listed, Bucket.look

    def list_(self: Bucket, folder: str) -> list[Listed]:
        found.append(folder)
        return listed(self, folder)

    def look_(self: Bucket, name: str) -> Listed | None:
        found.append(name)
        return look(self, name)

    monkeypatch.setattr(Bucket, "listed", list_)
    monkeypatch.setattr(Bucket, "look", look_)
    return found


@pytest.mark.parametrize("policy", ["full", "parity"])
def test_what_is_new_costs_no_listing(
    pushed: Store, saved: Checkpoints, bucket: Bucket, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each save of a job: the first objects are asked for, and each inherited layer."""
    saved.into(pushed, 8, policy=policy)
    asked = asked_of(monkeypatch)

    sent = push(pushed.repo, bucket, refs=None, runs=["r"], compares=False, progress=Silent())

    assert sent.commits == ("r@8",)
    record = pushed.repo.catalog.commit(pushed.repo.records.names("r")[-1]).record
    inherited = {entry.version.id for entry in record.layers if not entry.saved_by(record)}
    objects = [name for name in asked if name.startswith("objects/")]
    assert len(objects) == len(set(objects)) <= len(inherited) + REMOTE_REQUESTS_MAX
    assert {name.rpartition("/")[2] for name in objects} >= inherited
    assert not any(name in OBJECT_FOLDERS for name in asked)
    assert layerstore.open(bucket.url).verify(read_data=True).ok


def test_an_inherited_layer_that_is_lost_is_sent_again(pushed: Store, saved: Checkpoints, bucket: Bucket) -> None:
    """With all that it names."""
    saved.into(pushed, 8, policy="parity")
    record = pushed.repo.catalog.commit(pushed.repo.records.names("r")[-1]).record
    entry = next(entry for entry in record.layers if not entry.saved_by(record))
    lost = [entry.version.id, *(each.id for each in pushed.repo.version_of(entry).objects)]
    bucket.remove([pushed.repo.layout.object_name(each) for each in lost])

    push(pushed.repo, bucket, refs=None, runs=["r"], compares=False, progress=Silent())

    assert [bucket.size(pushed.repo.layout.object_name(each)) is not None for each in lost] == [True] * len(lost)


def test_what_goes_here_is_asked_for_or_listed(
    pushed: Store, saved: Checkpoints, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever takes fewer requests; never both for long."""
    asked = asked_of(monkeypatch)
    assert [fate.step for fate in pushed.gc(Keep(last=2), pushed_to=bucket.url, dry_run=True).removed] == [2]
    assert 0 < sum(name.startswith("objects/") for name in asked) < len(OBJECT_FOLDERS)

    saved.into(pushed, *range(8, 40, 2))
    pushed.push()
    asked.clear()
    assert len(pushed.gc(Keep(last=1), pushed_to=bucket.url, dry_run=True).removed) == 18
    assert sum(name in OBJECT_FOLDERS for name in asked) == len(OBJECT_FOLDERS)
    assert sum(name.startswith("objects/") for name in asked) <= 3 * len(OBJECT_FOLDERS)


def test_a_push_with_nothing_to_send_lists_once(pushed: Store, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects, one listing for each folder; and it writes nothing but the file that tells the time."""
    listings, written, listed = list[str](), list[str](), Bucket.listed

    def counted(self: Bucket, folder: str) -> list[Listed]:
        listings.append(folder)
        return listed(self, folder)

    monkeypatch.setattr(Bucket, "listed", counted)
    watch_writes(monkeypatch, before=lambda _, name: written.append(name))

    assert pushed.push().bytes_sent == 0

    assert len(listings) == 256 + 2
    assert [name for name in written if not name.startswith("gc/clock")] == []
