"""Promises of ``drop``: one record hides one commit, nobody else is hurt, and ingest brings it back."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import InvalidInput, NotFound, StorageIO
from layerstore.format.records import make_commit
from layerstore.model import Commit, CommitRecord, Fork, LayerEntry, Observed
from layerstore.storage.files import Files
from layerstore.storage.setup import open_rooms
from tests.unit.checkpoints import checkpoint, snapshot


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with sft@2, sft@4 and sft@6."""
    with layerstore.init(tmp_path / "store") as made:
        for step in (2, 4, 6):
            made.ingest(checkpoint(tmp_path, step=step))
        yield made


def steps(store: Store) -> list[int]:
    """Return the steps that the log shows."""
    return [entry.step for entry in store.log()]


def published(store: Store, record: CommitRecord) -> Commit:
    """Publish *record* as a saver would."""
    commit = make_commit(record, Observed(time_ns=0, bytes_new=0, bytes_reused=0))
    rooms = open_rooms(store.path, Files())
    rooms.records.link(commit)
    rooms.catalog.close()
    return commit


def record_of(store: Store, ref: str) -> CommitRecord:
    """Return the record of *ref*, as a pin holds it."""
    store.pin("looked", ref)
    record = next(pin.record for pin in store.pins() if pin.name == "looked")
    store.delete_pin("looked")
    return record


def test_a_dropped_commit_is_hidden_and_nothing_is_removed(store: Store) -> None:
    """The log leaves it out, its step is not found, and every file that was there is as it was."""
    before = snapshot(store)

    dropped = store.drop("sft@4")

    after = snapshot(store)
    assert steps(store) == [6, 2]
    assert after.items() >= before.items()
    assert after.keys() - before.keys() == {f"commits/sft/4.{dropped.hidden_by}"}
    with pytest.raises(NotFound, match="has no step 4"):
        store.show("sft@4")
    assert store.verify(read_data=True).ok


def test_dropping_twice_is_not_found(store: Store) -> None:
    """What is hidden cannot be hidden again, and no file is changed by the attempt."""
    store.drop("sft@4")
    before = snapshot(store)

    for dry_run in (True, False):
        with pytest.raises(NotFound, match="sft@4 is dropped already"):
            store.drop("sft@4", dry_run=dry_run)

    assert before == snapshot(store)


def test_an_unconfirmed_drop_is_confirmed_by_its_step(store: Store) -> None:
    """If the last fsync fails the commit is hidden; the hint names its step, because RUN means another one now."""
    commits = store.path / "commits" / "sft"
    syncs: list[Path] = []

    def refuse(operation: str, path: Path) -> None:
        if operation == "fsync" and path == commits:
            syncs.append(path)
            if len(syncs) == 1:
                raise StorageIO("the disk is ill", errno=errno.EIO, filename=str(path))

    with Store(store.path, hook=refuse) as unlucky:
        with pytest.raises(StorageIO, match="durability is not confirmed") as caught:
            unlucky.drop("sft")
        assert caught.value.hint == "layerstore drop sft@6 confirms it, once the disk is well"
        with pytest.raises(NotFound, match="sft@6 is dropped already"):
            unlucky.drop("sft@6")

    assert len(syncs) == 2
    assert steps(store) == [4, 2]


def test_the_runs_name_then_means_the_next_older_commit(store: Store) -> None:
    """Dropping the tip makes the one before it the tip."""
    dropped = store.drop("sft")

    assert (dropped.step, dropped.tip) == (6, "sft@4")
    assert store.show("sft").step == store.show().step == 4


def test_a_dry_run_says_the_same_and_writes_nothing(store: Store) -> None:
    """Even the id of the record that would hide it is known beforehand."""
    before = snapshot(store)

    planned = store.drop("sft@4", dry_run=True)

    assert before == snapshot(store)
    assert planned == store.drop("sft@4")


@pytest.mark.parametrize("without_index", [False, True])
def test_the_same_checkpoint_again_shows_it_again(store: Store, tmp_path: Path, without_index: bool) -> None:
    """The content is the same, the commit a new one at the same place; and this can go on for ever."""
    ids = [store.show("sft@4").commit]
    for _ in range(3):
        store.drop("sft@4")
        if without_index:
            store.reindex()
        ingested = store.ingest(tmp_path / "sft" / "checkpoint-4")
        assert (ingested.is_new, ingested.objects_new) == (True, 0)
        again = store.ingest(tmp_path / "sft" / "checkpoint-4")
        assert (again.is_new, again.commit) == (False, ingested.commit)
        ids.append(ingested.commit)

    assert len(set(ids)) == 4
    assert steps(store) == [6, 4, 2]
    assert [store.show(f"sft@{step}").save_number for step in (2, 4, 6)] == [0, 1, 2]
    assert store.verify(read_data=True).ok


def test_other_content_may_take_the_place_of_a_dropped_commit(store: Store, tmp_path: Path) -> None:
    """A hidden commit is no conflict: --replace is not needed, and the save number is the step's own."""
    store.drop("sft@4")

    ingested = store.ingest(checkpoint(tmp_path / "other", step=4, seed=1))

    assert store.show("sft@4").commit == ingested.commit
    assert store.show("sft@4").save_number == 1


def test_save_numbers_of_dropped_commits_are_not_given_again(store: Store, tmp_path: Path) -> None:
    """What is saved after a drop is numbered as if the dropped commit were there."""
    store.drop("sft@6")
    store.ingest(checkpoint(tmp_path, step=8))

    assert store.show("sft@8").save_number == 3


def test_the_last_commit_needs_consent_and_can_come_back(store: Store, tmp_path: Path) -> None:
    """Without it nothing changes; with it the run is empty, which every question says clearly."""
    store.drop("sft@2")
    store.drop("sft@4")
    with pytest.raises(InvalidInput, match="the last visible commit of attempt 1 of 'sft'") as caught:
        store.drop("sft@6")
    assert "--last" in (caught.value.hint or "")
    assert steps(store) == [6]

    assert store.drop("sft@6", last=True).tip is None

    assert store.log() == []
    for ref in ("sft", "sft@6", "sft~1", None):
        with pytest.raises(NotFound, match="has no visible commit: all were dropped"):
            store.show(ref)
    assert store.ingest(tmp_path / "sft" / "checkpoint-6").is_new
    assert (store.show("sft").step, store.show("sft").save_number) == (6, 2)


def test_an_empty_run_is_not_among_those_that_could_be_meant(store: Store, tmp_path: Path) -> None:
    """A run ingested under a wrong name, and dropped, is no reason to ask which run is meant."""
    store.ingest(tmp_path / "sft" / "checkpoint-2", run="stf")
    with pytest.raises(InvalidInput, match="2 runs"):
        store.show()

    store.drop("stf@2", last=True)

    assert store.show().run == "sft"


def test_pins_are_not_dropped_but_keep_what_is(store: Store) -> None:
    """A pin is refused with the command that deletes it; a pinned commit may go, the pin stays readable."""
    store.pin("best", "sft@4")
    with pytest.raises(InvalidInput, match="'best' is a pin") as caught:
        store.drop("best")
    assert "pin --delete best" in (caught.value.hint or "")

    dropped = store.drop("sft@4")

    assert dropped.pins == ("best",)
    assert store.show("best").step == 4


def test_later_commits_keep_the_layers_that_came_from_it(store: Store, tmp_path: Path) -> None:
    """They are named, and still compose to the same versions."""
    whole, own = record_of(store, "sft@4"), record_of(store, "sft@6")
    inherited: tuple[LayerEntry, ...] = (whole.layers[0], *own.layers[1:])
    fields = {name: getattr(own, name) for name in CommitRecord.__slots__}
    heir = published(store, CommitRecord(**fields | {"step": 8, "save_number": 3, "layers": inherited}))
    versions = [line.version for line in store.ls("sft@8")]

    dropped = store.drop("sft@4")

    assert dropped.inherited_by == ("sft@8",)
    assert store.show("sft").commit == heir.id
    assert versions == [line.version for line in store.ls("sft@8")]
    assert store.compose("sft@8").write(tmp_path / "out").step == 8


def test_the_last_of_a_newer_attempt_gives_the_name_back_to_the_older(store: Store) -> None:
    """An attempt without visible commits is none: the run then means the attempt before, as the error says."""
    own = record_of(store, "sft@6")
    fields = {name: getattr(own, name) for name in CommitRecord.__slots__}
    published(store, CommitRecord(**fields | {"step": 5, "attempt": 2, "fork": Fork(attempt=1, step=4)}))
    assert store.show("sft").step == 5

    with pytest.raises(InvalidInput, match="of attempt 2") as caught:
        store.drop("sft@5")
    assert "sft then means sft@6" in (caught.value.hint or "")
    dropped = store.drop("sft@5", last=True)

    assert (dropped.tip, store.show("sft").step) == ("sft@6", 6)


def test_a_lost_hiding_record_does_not_bring_the_commit_back_in_silence(store: Store) -> None:
    """If the record that hides is damaged, its step is an error, not the commit that it hid."""
    hidden_by = store.drop("sft@4").hidden_by
    path = store.path / "commits" / "sft" / f"4.{hidden_by}"
    path.chmod(0o644)
    path.write_bytes(b"damaged")
    store.reindex()

    with pytest.raises(layerstore.errors.IntegrityError):
        store.show("sft@4")
