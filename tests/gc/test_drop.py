"""Promises of ``drop`` and ``undrop``: one record moves to the trash and back, and nobody else is hurt."""

import errno
import os
from pathlib import Path

import pytest

from layerstore import Store
from layerstore.errors import Conflict, IntegrityError, InvalidInput, NotFound, Overtaken, StorageIO
from layerstore.history import Needs, named_by
from layerstore.model import Commit
from layerstore.publish import Published, republish
from layerstore.storage import RecordName, Repository
from layerstore.storage.commits import RecordStore
from tests.gc.test_gc import collect, masters, steps
from tests.unit.checkpoints import Checkpoints, snapshot


@pytest.fixture
def three(store: Store, saved: Checkpoints) -> Store:
    """Return a store with r@2, r@4 and r@6."""
    saved.into(store, 2, 4, 6)
    return store


def in_trash(store: Store) -> list[int]:
    """Return the steps that lie in the trash."""
    return [each.commit.record.step for each in store.dropped("r")]


def test_a_dropped_commit_moves_to_the_trash_and_back(three: Store) -> None:
    """The log leaves it out, its step is not found, no other file changes; and all is as before once it is back."""
    before, commit = snapshot(three), three.show("r@4").commit

    dropped = three.drop("r@4")
    after = snapshot(three)
    with pytest.raises(NotFound):
        three.show("r@4")
    shown = steps(three)
    back = three.undrop("r@4")

    assert (dropped.commit, dropped.tip, dropped.size_bytes > 0) == (commit, "r@6", True)
    assert before.keys() - after.keys() == {f"commits/r/4.{commit}"}
    assert after.items() <= before.items()
    assert shown == [6, 2]
    assert (back.id, steps(three), in_trash(three)) == (commit, [6, 4, 2], [])
    assert snapshot(three) == before
    assert three.verify(read_data=True).ok


def test_dropping_twice_is_not_found(three: Store) -> None:
    """No file is changed by the attempt."""
    three.drop("r@4")
    before = snapshot(three)

    for dry_run in (True, False):
        with pytest.raises(NotFound, match="r"):
            three.drop("r@4", dry_run=dry_run)
    three.undrop("r@4")
    with pytest.raises(NotFound, match="r@4 is not in the trash"):
        three.undrop("r@4")

    assert before.items() <= snapshot(three).items()


def test_a_dry_run_says_the_same_and_writes_nothing(three: Store) -> None:
    """Also how many bytes a collection frees, and what the run means then."""
    before = snapshot(three)

    planned = three.drop("r", dry_run=True)

    assert before == snapshot(three)
    assert (planned.step, planned.tip, planned.is_tip) == (6, "r@4", True)
    assert planned == three.drop("r")
    freed = collect(three).bytes_freed
    assert freed == planned.size_bytes


def test_a_drop_reads_only_the_records_next_to_it(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run has thousands: the index says what the others inherit and share."""
    saved.into(store, 2, 4, 6, 8, 10, 12, 14, policy="parity")
    steps_read: set[int] = set()
    read = RecordStore.read_bytes

    def noted(records: RecordStore, name: RecordName) -> bytes:
        steps_read.add(name.step)
        return read(records, name)

    monkeypatch.setattr(RecordStore, "read_bytes", noted)
    dropped = store.drop("r@6", dry_run=True)

    assert steps_read == {2, 4, 6, 8, 10}
    assert dropped.inherited_by == ("r@8",)


def test_what_another_run_needs_is_not_freed(three: Store, saved: Checkpoints) -> None:
    """The same save under a mistyped name shares all but the record; once that is dropped too, its bytes go."""
    alone = three.drop("r@4", dry_run=True).size_bytes
    three.ingest(saved(4), run="typo")
    shared = three.drop("r@4", dry_run=True).size_bytes
    three.drop("typo@4")

    assert (shared, three.drop("r@4").size_bytes) == (0, alone)
    assert alone > 0


def test_several_are_dropped_as_they_were_planned(store: Store, saved: Checkpoints) -> None:
    """Each says what stays without all of them; what they share counts once, and is freed."""
    saved.into(store, 2, 4, 6, 8, policy="parity")
    saved.into(store, 2, run="other")
    before = snapshot(store)

    planned = store.drop_commits(["r@4", "r@6", "r@4"], runs=["other"], dry_run=True)
    alone = [store.drop(ref, dry_run=True).size_bytes for ref in ("r@4", "r@6", "other")]

    assert before == snapshot(store)
    assert [commit.reference for commit in planned] == ["r@4", "r@6", "other@2"]
    assert [commit.inherited_by for commit in planned] == [(), ("r@8",), ()]
    assert [(commit.tip, commit.is_tip) for commit in planned] == [("r@8", False), ("r@8", False), (None, True)]
    assert planned == store.drop_commits(["r@4", "r@6"], runs=["other"])
    assert steps(store, "r") == [8, 2]
    assert "other" not in store.runs()
    assert collect(store).bytes_freed == sum(commit.size_bytes for commit in planned) > sum(alone)
    assert store.verify(read_data=True).ok


def test_an_exact_save_that_two_runs_share_is_not_freed(store: Store, saved: Checkpoints) -> None:
    """Nor counted with what refers to it: the other run keeps it."""
    saved.into(store, 2, 4, precision="delta8")
    saved.into(store, 2, 6, run="other", precision="delta4")

    dropped = store.drop_commits([], runs=["other"])

    assert collect(store).bytes_freed == sum(commit.size_bytes for commit in dropped) > 0


def test_none_of_several_is_dropped_if_one_is_not_found(three: Store) -> None:
    """Nor if one is in the trash already, or a record of the run cannot be read."""
    commit = three.drop("r@4").commit
    before = snapshot(three)
    for refs, runs in ((["r@2", "r@8"], []), (["r@2", commit], []), (["r@2"], ["none"]), ([], ["r", "none"])):
        for dry_run in (True, False):
            with pytest.raises(NotFound):
                three.drop_commits(refs, runs=runs, dry_run=dry_run)
    assert before == {path: data for path, data in snapshot(three).items() if path in before}

    [record] = (three.path / "commits" / "r").glob("2.*")
    record.chmod(0o644)
    record.write_bytes(b"damaged")
    three.reindex()
    before = snapshot(three)
    with pytest.raises(IntegrityError, match="nothing was changed"):
        three.drop_commits(runs=["r"])
    assert before == snapshot(three)
    assert three.drop_commits() == []


def test_a_dropped_commit_is_composed_by_its_id(three: Store, tmp_path: Path) -> None:
    """As long as it is in the trash nothing of it is collected."""
    kept, commit = masters(three, "r@4"), three.drop("r@4").commit
    collect(three, empty_trash=False)

    assert three.show(commit[:12]).step == 4
    assert masters(three, commit) == kept
    three.compose(commit).write(tmp_path / "out")


@pytest.mark.filterwarnings("ignore:.*no longer there:layerstore.storage.IndexNotice")
def test_a_disk_that_fails_leaves_it_where_it_is_found(three: Store) -> None:
    """If the move cannot be confirmed, the commit is in the log or in the trash."""
    trash = three.path / "trash" / "commits" / "r"

    def refuse(operation: str, path: Path) -> None:
        if operation == "fsync" and path == trash:
            raise StorageIO("the disk is ill", errno=errno.EIO, filename=str(path))

    with Store(three.path, hook=refuse) as unlucky, pytest.raises(StorageIO):
        unlucky.drop("r@4")

    assert sorted([*steps(three), *in_trash(three)]) == [2, 4, 6]


def test_the_same_checkpoint_again_shows_it_again(three: Store, saved: Checkpoints) -> None:
    """It is the very same commit, any number of times, with an index and without."""
    commit = three.show("r@4").commit
    for without_index in (False, True):
        three.drop("r@4")
        if without_index:
            three.reindex()
        ingested = three.ingest(saved(4), run="r")
        assert (ingested.is_new, ingested.objects_new, ingested.commit) == (True, 0, commit)
        assert not three.ingest(saved(4), run="r").is_new

    assert [three.show(f"r@{step}").save_number for step in (2, 4, 6)] == [0, 1, 2]
    assert three.verify(read_data=True).ok


def test_its_place_may_be_taken_and_then_it_stays_in_the_trash(three: Store, saved: Checkpoints) -> None:
    """Other content needs no --replace, has the place's number, and has to make room before the old one is back."""
    old = three.drop("r@4").commit
    new = three.ingest(saved(4, seed=1), run="r").commit

    assert three.show("r@4").save_number == 1
    with pytest.raises(Conflict, match=r"r@4 is commit .* now"):
        three.undrop("r@4")
    three.drop("r@4")
    with pytest.raises(Conflict, match="2 commits of r@4 are in the trash"):
        three.undrop("r@4")
    assert three.undrop(old[:12]).id == old != new


def test_a_run_comes_back_as_it_was_last(three: Store, saved: Checkpoints) -> None:
    """Of a step's commits, the one that was dropped last; what a step has by now is left to it."""
    old = three.drop("r@4").commit
    new = three.ingest(saved(4, seed=1), run="r").commit
    three.drop_commits(runs=["r"])

    with pytest.raises(Conflict, match="both belong at r@4; nothing was changed"):
        three.undrop_commits([old, new])
    assert steps(three) == []
    back = three.undrop_commits(["r@2"], runs=["r"])
    with pytest.raises(Conflict, match=r"r@4 is commit .* now"):
        three.undrop_commits(runs=["r"])
    three.drop("r@2")

    assert [commit.step for commit in back] == [2, 4, 6]
    assert (three.show("r@4").commit, in_trash(three)) == (new, [4, 2])
    assert [commit.step for commit in three.undrop_commits(runs=["r"])] == [2]
    assert three.verify().ok


def test_a_damaged_record_in_the_trash_stops_what_would_bring_back_an_older_one(
    three: Store, saved: Checkpoints
) -> None:
    """The run's; commits that are named come back."""
    old = three.drop("r@4").commit
    new = three.ingest(saved(4, seed=1), run="r").commit
    three.drop_commits(runs=["r"])
    record = next((three.path / "trash" / "commits" / "r").glob(f"4.{new}*"))
    record.chmod(0o644)
    record.write_bytes(b"rot")

    with pytest.raises(IntegrityError, match="r/4"):
        three.undrop_commits(runs=["r"])

    assert steps(three) == []
    assert three.undrop(old).id == old


def test_an_undrop_that_stopped_half_way_is_repeated(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is visible and in the trash only leaves the trash."""
    three.drop_commits(runs=["r"])
    with monkeypatch.context() as patch:
        calls = list[str]()

        def refusing(repo: Repository, commit: Commit) -> Published:
            calls.append(commit.id)
            if len(calls) == 2:
                raise StorageIO("no space left", errno=28, filename="r")
            return republish(repo, commit)

        patch.setattr("layerstore.gc.drop.republish", refusing)
        with pytest.raises(StorageIO):
            three.undrop_commits(["r@2", "r@4"])
    assert (steps(three), in_trash(three)) == ([2], [6, 4])
    assert [name.step for name in three.repo.trash.records()] == [2, 4, 6]

    assert [commit.step for commit in three.undrop_commits(["r@2"], runs=["r"])] == [2, 4, 6]
    assert (steps(three), three.repo.trash.records()) == ([6, 4, 2], [])


def test_of_an_attempt_whose_number_was_given_again_a_run_gets_the_newest(store: Store, saved: Checkpoints) -> None:
    """The commits of the other history stay in the trash, and can be composed from there."""
    saved.into(store, 2, 4)
    store.ingest(saved(3), run="r", rollback=True)
    store.drop("r@3")
    newer = store.ingest(saved(1, seed=9), run="r", rollback=True)
    store.drop_commits(runs=["r"])

    back = store.undrop_commits(runs=["r"])

    assert sorted((commit.record.attempt, commit.step) for commit in back) == [(1, 2), (1, 4), (2, 1)]
    assert newer.commit in {commit.id for commit in back}
    assert in_trash(store) == [3]


def test_if_one_cannot_come_back_none_does(three: Store) -> None:
    """A lost object of one is found before the first of them is in the log."""
    lost = three.compose("r@4").layers["lm_head"].version
    three.drop_commits(runs=["r"])
    (three.path / "objects" / lost[:2] / lost).unlink()
    before = snapshot(three)

    with pytest.raises(Overtaken, match=r"r@4 \(commit .*\) cannot come back"):
        three.undrop_commits(runs=["r"])

    assert snapshot(three) == before
    assert in_trash(three) == [6, 4, 2]


def test_it_does_not_come_back_into_another_attempt(store: Store, saved: Checkpoints) -> None:
    """Once all of an attempt was dropped its number may be given again, to one that forked elsewhere."""
    saved.into(store, 2, 4)
    store.ingest(saved(3), run="r", rollback=True)
    store.drop("r@3")
    assert store.ingest(saved(1, seed=9), run="r", rollback=True).attempt == 2

    with pytest.raises(Conflict, match="attempt 2 of 'r' has a different history now"):
        store.undrop("r@3")

    assert in_trash(store) == [3]


def test_a_run_may_be_dropped_to_the_last(three: Store, saved: Checkpoints) -> None:
    """Every question says that there is nothing; nobody can mean the run, and any save begins it again."""
    three.ingest(saved(2), run="other")
    for step in (2, 4, 6):
        tip = three.drop(f"r@{step}").tip

    assert tip is None
    for ref in ("r", "r@6", "r~1"):
        with pytest.raises(NotFound):
            three.show(ref)
    assert three.show().run == "other"
    assert three.ingest(saved(6), run="r").is_new
    assert steps(three, "r") == [6]


def test_pins_are_not_dropped_but_keep_what_is(three: Store) -> None:
    """A pin is refused with the command that deletes it; a pinned commit may go, the pin stays readable."""
    three.pin("best", "r@4")
    with pytest.raises(InvalidInput, match="'best' is a pin") as caught:
        three.drop("best")
    assert "pin --delete best" in (caught.value.hint or "")

    dropped = three.drop("r@4")
    collect(three)

    assert (dropped.pins, dropped.size_bytes) == (("best",), 0)
    assert three.show("best").step == 4
    assert three.verify(read_data=True).ok


def test_later_commits_keep_the_layers_that_came_from_it(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """They are named, and still compose to the same versions when the trash is empty."""
    saved.into(store, 2, 4, 6, policy="parity")
    kept = masters(store, "r@6")

    dropped = store.drop("r@4")
    collect(store)

    assert dropped.inherited_by == ("r@6",)
    assert masters(store, "r@6") == kept
    assert store.compose("r@6").write(tmp_path / "out").step == 6


def test_a_record_that_cannot_be_read_is_given_up(three: Store) -> None:
    """By its step; a collection has stopped at it until then."""
    [record] = (three.path / "commits" / "r").glob("4.*")
    record.chmod(0o644)
    record.write_bytes(b"damaged")
    three.reindex()

    assert len(three.give_up("r@4", dry_run=True)) == len(three.give_up("r@4")) == 1

    assert not record.exists()
    assert len(list((three.path / "trash" / "damaged").rglob("4.*"))) == 1
    assert collect(three).trash.count == 1
    assert three.verify(read_data=True).ok


def test_a_record_that_is_only_unreadable_now_is_not_given_up(three: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of somebody else's, say: drop says so, and nothing is moved."""
    before, read = snapshot(three), RecordStore.read_bytes

    def refused(records: RecordStore, name: RecordName) -> bytes:
        if name.step == 4:
            raise StorageIO("r@4 cannot be read: Permission denied", errno=errno.EACCES, filename="4")
        return read(records, name)

    monkeypatch.setattr(RecordStore, "read_bytes", refused)
    three.reindex()

    assert three.give_up("r@4") == ()
    with pytest.raises(StorageIO, match="Permission denied"):
        three.drop("r@4")
    assert snapshot(three) == before


def test_rot_in_a_dropped_commit_costs_no_other_layer(three: Store) -> None:
    """What the sound blobs of it name is kept for as long as it lies in the trash, and is not loose."""
    layers = three.compose("r@4").layers
    rotten = layers["lm_head"].version
    blob = three.path / "objects" / rotten[:2] / rotten
    kept = [three.path / "objects" / each.version[:2] / each.version for each in layers.values()]
    three.drop("r@4")
    blob.chmod(0o644)
    blob.write_bytes(b"rotten")
    os.utime(blob, (0, 0))

    three.gc(grace_seconds=0)

    assert [path for path in kept if not path.exists()] == [blob]
    with pytest.raises(Overtaken, match="r@4 cannot come back"):
        three.undrop("r@4")


def test_what_was_replaced_does_not_come_back_beside_its_successor(store: Store, saved: Checkpoints) -> None:
    """It would stay hidden: the refusal names the commit that makes room for it."""
    saved.into(store, 2, 4)
    old = store.show("r@4").commit
    new = store.ingest(saved(4, seed=40), run="r", replace=True).commit
    store.ingest(saved(2, seed=20), run="r", rollback=True)

    with pytest.raises(Conflict, match=new[:12]):
        store.undrop(old)
    store.drop(new)
    assert store.undrop(old).id == old


def test_a_run_does_not_come_back_under_a_pins_name(store: Store, saved: Checkpoints) -> None:
    """Runs and pins share their names; and a few digits name no commit."""
    saved.into(store, 2)
    saved.into(store, 2, run="a")
    commit = store.drop("a@2").commit
    store.pin("a", "r@2")

    with pytest.raises(Conflict, match="'a' is the name of a pin"):
        store.undrop(commit)
    store.delete_pin("a")
    with pytest.raises(NotFound):
        store.undrop(commit[:2])
    assert store.undrop(commit).id == commit


@pytest.mark.fault(112)
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("is_blob", [False, True])
def test_damage_of_a_dropped_commit_is_found_before_it_comes_back(three: Store, is_blob: bool, is_cut: bool) -> None:
    """A verify that reads reads what only the trash names; a repair takes it out, and then nothing brings it back."""
    three.drop("r@4")
    [name] = three.repo.trash.records()
    record = three.repo.trash.read_record(name).record
    versions = [entry.version for entry in record.layers]
    needed = {*versions} if is_blob else {each for version in versions for each in named_by(three.repo, version)}
    kept = Needs(three.repo)
    for other in three.repo.records.names("r"):
        kept.add_record(three.repo.records.read(other).record)
    path = three.repo.layout.object(min(ref.id for ref in needed if ref.id not in kept))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + (b"" if is_cut else bytes([data[-1] ^ 1])))

    assert three.verify().ok
    [damage] = three.verify(read_data=True).damaged
    assert damage.id == path.name
    assert [(cost.everything, len(cost.layers)) for cost in damage.costs] == [(False, 1)]
    assert damage.needed_by[0].startswith("r@4 (commit ")

    assert [moved.path for moved in three.repair(read_data=True).moved] == [f"objects/{path.name[:2]}/{path.name}"]
    assert three.verify(read_data=True).ok
    with pytest.raises(Overtaken, match="r@4 cannot come back"):
        three.undrop("r@4")
    assert steps(three) == [6, 2]
