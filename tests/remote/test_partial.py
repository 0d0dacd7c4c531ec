"""A partial clone has all records, fetches tensors when they are needed, and is written to like any store."""

from pathlib import Path

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.errors import AlreadyExists, IntegrityError, NoStore, Overtaken
from layerstore.model import ObjectId
from layerstore.remote import Bucket
from tests.unit.checkpoints import Checkpoints, digests


@pytest.fixture
def clone(pinned: Store, url: str, tmp_path: Path) -> Store:
    """Return a partial clone of it."""
    return layerstore.clone(url, tmp_path / "clone", records=True)


def objects(store: Store) -> set[str]:
    """Return the names of the objects that are in the folder of *store*."""
    return {path.name for path in (store.path / "objects").glob("*/*")}


def test_it_has_all_records_and_no_tensors(pinned: Store, clone: Store) -> None:
    """Questions are answered without the bucket."""
    assert clone.log() == pinned.log()
    assert clone.pins() == pinned.pins()
    assert clone.diff("r@2", "r@6") == pinned.diff("r@2", "r@6")
    names = pinned.repo.records.names("r")
    blobs = {blob.id for name in names for blob in pinned.repo.catalog.commit(name).record.blobs}
    assert objects(clone) == blobs


def test_tensors_come_when_they_are_needed(pinned: Store, clone: Store, tmp_path: Path) -> None:
    """And stay: without the bucket the same composite can be written again."""
    before = objects(clone)
    clone.compose("r@4").write(tmp_path / "there")
    pinned.compose("r@4").write(tmp_path / "here")
    assert digests(tmp_path / "there") == digests(tmp_path / "here")
    assert before < objects(clone) < objects(pinned)

    clone.repo.layout.partial.write_text('{"url": "memory://another"}')
    again = layerstore.open(clone.path)
    again.compose("r@4").write(tmp_path / "again")
    assert digests(tmp_path / "again") == digests(tmp_path / "here")
    with pytest.raises(IntegrityError, match="memory://another"):
        again.compose("r@2").write(tmp_path / "other")


def test_it_is_written_to(pinned: Store, clone: Store, saved: Checkpoints, url: str, tmp_path: Path) -> None:
    """What is saved there inherits layers that are not there, is pushed, and is whole elsewhere."""
    saved.into(clone, 8, policy="parity")
    assert clone.verify().ok
    assert clone.push().commits == ("r@8",)

    with layerstore.clone(url, tmp_path / "whole") as whole:
        assert whole.verify(read_data=True).ok
        whole.compose("r@8").write(tmp_path / "whole 8")
    clone.compose("r@8").write(tmp_path / "partial 8")
    assert digests(tmp_path / "whole 8") == digests(tmp_path / "partial 8")

    assert pinned.pull(url).commits == ("r@8",)
    saved.into(pinned, 10)
    pinned.push(url)
    before = objects(clone)
    assert clone.pull().commits == ("r@10",)
    new = {blob.id for blob in clone.repo.catalog.commit(clone.repo.records.names("r")[-1]).record.blobs}
    assert objects(clone) == before | new


def test_collecting_it_leaves_the_remote_alone(pinned: Store, clone: Store, url: str) -> None:
    """What nothing there needs goes, and what was never there is no error."""
    clone.gc(Keep(last=1), grace_seconds=0, empty_trash=True)
    assert [entry.step for entry in clone.log()] == [6, 4]  # one is pinned
    assert clone.verify(read_data=True).ok
    assert layerstore.open(url).verify(read_data=True).ok


@pytest.mark.fault(155)
@pytest.mark.parametrize("where", ["bucket", "clone"])
def test_each_question_looks_at_the_bucket_anew(clone: Store, pinned: Store, url: str, where: str) -> None:
    """What it has lost since the last one is damage, nothing is removed for it, and what needs it stays dropped."""
    with layerstore.open(url if where == "bucket" else clone.path) as asked:
        assert asked.verify().ok
        missing = tensor_of(pinned, 6)
        data = (pinned.path / missing).read_bytes()
        Bucket(url).remove([missing.as_posix()])
        assert [damage.path for damage in asked.verify().damaged] == [missing.as_posix()]
        Bucket(url).write(missing.as_posix(), lambda: [data])
        assert asked.verify().ok


@pytest.mark.fault(155)
def test_nothing_goes_or_comes_back_for_what_the_bucket_has_lost(clone: Store, pinned: Store, url: str) -> None:
    """A commit that stays has lost something since: it might be the only copy; and one in the trash stays there."""
    assert clone.verify().ok
    clone.drop("r@4")
    kept, gone = tensor_of(pinned, 6).as_posix(), tensor_of(pinned, 4).as_posix()
    before = objects(clone)
    Bucket(url).remove([kept, gone])

    with pytest.raises(IntegrityError, match="r@6 stays, but is incomplete"):
        clone.gc(Keep(last=1), grace_seconds=0)
    with pytest.raises(Overtaken, match="r@4 cannot come back"):
        clone.undrop("r@4")

    assert objects(clone) == before


def test_its_note_may_be_damaged(clone: Store) -> None:
    """Then it is not opened: half of it would look lost."""
    for text in ("{}", "[]", "x", '{"url": "elsewhere"}', '{"url": 1}'):
        clone.repo.layout.partial.write_text(text)
        with pytest.raises(IntegrityError, match="does not say which remote"):
            layerstore.open(clone.path)


def test_it_outlives_the_name_of_its_origin(pinned: Store, clone: Store, tmp_path: Path) -> None:
    """Names are for people."""
    clone.remotes.remove("origin")
    with layerstore.open(clone.path) as again:
        again.compose("r@2").write(tmp_path / "out")


def test_what_another_remote_sends_is_whole(pinned: Store, clone: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Only its origin can be asked later."""
    saved.into(pinned, 8)
    pinned.push(f"file://{tmp_path}/other")
    clone.pull(f"file://{tmp_path}/other")
    (tmp_path / "other").rename(tmp_path / "away")
    clone.compose("r@8").write(tmp_path / "out")


def test_a_whole_clone_is_not_made_partial(pinned: Store, url: str, tmp_path: Path) -> None:
    """Later pulls would bring no tensors."""
    layerstore.clone(url, tmp_path / "whole").close()
    with pytest.raises(AlreadyExists, match="with all tensors"):
        layerstore.clone(url, tmp_path / "whole", records=True)


def test_a_partial_clone_is_not_taken_for_a_whole_one(clone: Store, url: str) -> None:
    """Somebody might remove the bucket then."""
    before = objects(clone)
    with pytest.raises(AlreadyExists, match="is a partial clone"):
        layerstore.clone(url, clone.path)
    assert objects(clone) == before


def harm(store: Store, path: Path) -> None:
    """Flip a bit of a file below *store*."""
    data = bytearray((store.path / path).read_bytes())
    data[-1] ^= 1
    (store.path / path).write_bytes(data)


def tensor_of(store: Store, step: int) -> Path:
    """Return where an object is that only *step* needs."""
    needs = {
        name.step: {
            stored.id
            for entry in store.repo.catalog.commit(name).record.layers
            for stored in store.repo.version_of(entry).objects
        }
        for name in store.repo.records.names("r")
    }
    only = needs.pop(step).difference(*needs.values())
    return Path(store.repo.layout.object_name(ObjectId(min(only))))


@pytest.mark.fault(110)
def test_a_verify_fetches_and_heals_nothing(pinned: Store, clone: Store, tmp_path: Path) -> None:
    """What is here is read here, and what is not in the bucket; a repair takes the sound copy from there."""
    clone.compose("r@4").write(tmp_path / "out")
    path = tensor_of(clone, 4)
    harm(clone, path)
    before, harmed = objects(clone), (clone.path / path).read_bytes()

    verdict = clone.verify(read_data=True)

    assert [(damage.path, damage.needed_by) for damage in verdict.damaged] == [(path.as_posix(), ("r@4", "best"))]
    assert (objects(clone), (clone.path / path).read_bytes()) == (before, harmed)
    assert verdict.objects_read == pinned.verify(read_data=True).objects_read
    assert [(of.path, of.source) for of in clone.repair(read_data=True).fetched] == [
        (path.as_posix(), clone.remotes.url("origin"))
    ]
    assert clone.verify(read_data=True).ok


@pytest.mark.fault(110)
def test_damage_in_the_bucket_is_found_from_a_partial_clone(clone: Store, pinned: Store, bucket: Bucket) -> None:
    """Also in what was never fetched."""
    path = tensor_of(pinned, 2).as_posix()
    data = (pinned.path / path).read_bytes()
    bucket.write(path, lambda: [data[:-1] + bytes([data[-1] ^ 1])])
    assert clone.verify().ok
    [damage] = clone.verify(read_data=True).damaged
    assert (damage.path, bucket.url in damage.reason) == (path, True)


@pytest.mark.fault(111)
def test_what_was_never_pushed_is_damaged_here(clone: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """The bucket, which never had it, is not blamed."""
    saved.into(clone, 8)
    path = tensor_of(clone, 8)
    harm(clone, path)

    [damage] = clone.verify(read_data=True).damaged
    with pytest.raises(IntegrityError, match=f"{path.name} is damaged"):
        clone.compose("r@8").write(tmp_path / "out")

    assert damage.path == path.as_posix()
    assert "its bytes hash to" in damage.reason


@pytest.mark.fault(155)
def test_a_bucket_that_is_not_there_says_nothing_of_its_objects(pinned: Store, tmp_path: Path) -> None:
    """As while the disk that has it is not mounted: one error, and no damage is told."""
    pinned.push(f"file://{tmp_path}/disk")
    with layerstore.clone(f"file://{tmp_path}/disk", tmp_path / "partial", records=True) as partial:
        (tmp_path / "disk").rename(tmp_path / "elsewhere")

        for read_data in (False, True):
            with pytest.raises(NoStore, match="there is no folder"):
                partial.verify(read_data=read_data)
        with pytest.raises(NoStore, match="there is no folder"):
            partial.compose("r@2").write(tmp_path / "out")
