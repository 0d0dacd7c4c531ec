"""What others do while a collection is at work, and what one that was stopped leaves to the next."""

import contextlib
import errno
import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import layerstore
from layerstore import Keep, Store
from layerstore.disk import Files
from layerstore.errors import Conflict, IntegrityError, NotFound, Overtaken, StorageIO
from layerstore.gc.mark import Marks
from layerstore.history import Resolved, resolve
from layerstore.model import BlobRef, Commit, CommitRecord
from layerstore.parts import Part
from layerstore.progress import Progress
from layerstore.publish.pins import make_pin
from layerstore.publish.transaction import Transaction
from layerstore.storage import ObjectStore, RecordName, RecordStore, Repository, open_repository, trash
from layerstore.storage.trash import Aside
from tests.gc.test_gc import Stopped, collect, grow_old, objects, once, steps, stop
from tests.unit.checkpoints import Checkpoints

FIRST = Keep(last=1)


def looked_up(store: Store, ref: str) -> Resolved:
    """Return what somebody has looked up who is slow to make something of it."""
    return resolve(open_repository(store.path, Files()), ref)


def pinned(store: Store, name: str, found: Resolved) -> bool:
    """Pin what was looked up; return whether that was possible."""
    try:
        make_pin(open_repository(store.path, Files()), name, found)
    except Conflict:
        return False
    return True


def blobs_of(record: CommitRecord) -> set[str]:
    """Return the ids of a record's version and state blobs."""
    return {entry.version.id for entry in record.layers} | {state.id for state in record.states}


# -- others at work ------------------------------------------------------------------------------------------------


@pytest.mark.fault(49)
@pytest.mark.parametrize(
    ("is_known", "operation", "part"),
    [(False, "link", "objects"), (False, "link", "commits"), (True, "rename", "commits")],
)
def test_a_collection_without_grace_beside_an_ingest_is_named(
    store: Store, saved: Checkpoints, operation: str, part: str, is_known: bool
) -> None:
    """It takes what the ingest has in tmp/: one line says so, and that the same again succeeds."""
    if is_known:
        store.ingest(saved(10), run="r")

    def collect_all() -> None:
        with layerstore.open(store.path) as other:
            collect(other)

    with (
        Store(store.path, hook=once(operation, part, collect_all)) as hooked,
        pytest.raises(Overtaken, match="were removed from the store") as caught,
    ):
        hooked.ingest(saved(10), run="r")

    assert "gc --grace 0s" in (caught.value.hint or "")
    assert store.ingest(saved(10), run="r").is_new != is_known
    assert store.verify(read_data=True).ok


@pytest.mark.fault(49, 51)
def test_a_commit_whose_times_are_old_is_seen_at_the_second_look(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its youth saves it: the record that names it does, a pin does, and they came after the plan."""
    saved.into(store, 10, 20, 30)
    old = looked_up(store, "r@20")

    looks: list[Marks] = []
    look = Marks.look

    def save_before_the_second(
        self: Marks, progress: Progress, *, without: Set[RecordName] = frozenset(), has_to_be_whole: bool = False
    ) -> None:
        if len(looks) == 1:
            with layerstore.open(store.path) as other:
                other.ingest(saved(10), run="again")
            assert pinned(store, "kept", old)
            grow_old(store)
            for path in (store.path / "gc" / "aside").iterdir():
                os.utime(path, (1, 1))
        looks.append(self)
        look(self, progress, without=without, has_to_be_whole=has_to_be_whole)

    monkeypatch.setattr(Marks, "look", save_before_the_second)
    grow_old(store)
    collect(store, FIRST, runs=["r"], grace_seconds=None)

    assert len(looks) == 3
    assert store.verify(read_data=True).ok


@pytest.mark.fault(49, 51)
def test_the_same_ingest_again_while_its_commit_is_collected(store: Store, saved: Checkpoints) -> None:
    """It inherits, and claims what it does: it is whole and new, or refused."""
    saved.into(store, 10, 20, 30, policy="parity")
    grow_old(store)

    def collect_it() -> None:
        with layerstore.open(store.path) as other:
            collect(other, FIRST, grace_seconds=None)

    with Store(store.path, hook=once("link", "commits", collect_it)) as writing:
        again = writing.ingest(saved(20), run="r", policy="parity")

    assert again.is_new
    with layerstore.open(store.path) as fresh:
        assert steps(fresh, "r") == [30, 20]
        assert fresh.verify(read_data=True).ok


def collected_before_read(store: Store, number: int) -> Callable[[RecordStore, RecordName], bytes]:
    """Return a reading of records that all but the newest commit are collected before, the *number*-th time."""
    read, met = RecordStore.read_bytes, list[RecordName]()

    def slow(self: RecordStore, name: RecordName) -> bytes:
        met.append(name)
        if len(met) == number:
            with patch.object(RecordStore, "read_bytes", read), layerstore.open(store.path) as other:
                assert collect(other, FIRST, grace_seconds=None).removed
        return read(self, name)

    return slow


@pytest.mark.fault(49)
@pytest.mark.parametrize(("policy", "number"), [("parity", 1), ("parity", 2), ("full", 3), ("parity", 4)])
def test_an_ingest_decides_again_when_what_it_looked_at_is_collected(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, policy: str, number: int
) -> None:
    """Whichever of its looks at a record that is: the step is saved, as if the collection had come first or last."""
    saved.into(store, 10, 20, 30, policy=policy)
    grow_old(store)
    monkeypatch.setattr(RecordStore, "read_bytes", collected_before_read(store, number))

    with layerstore.open(store.path) as writing:
        again = writing.ingest(saved(20), run="r", policy=policy)
    monkeypatch.undo()

    with layerstore.open(store.path) as fresh:
        if steps(fresh, "r") != [30, 20]:
            assert steps(fresh, "r") == [30, 20, 10], "the collection came, or there were fewer looks"
        assert fresh.show("r@20").commit == again.commit
        assert fresh.verify(read_data=True).ok


@pytest.mark.parametrize(
    "left_out",
    [lambda store: store.stats().left_out, lambda store: store.report()["left_out"]],
    ids=["stats", "report"],
)
def test_what_is_collected_while_many_are_looked_at_is_left_out_in_silence(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch, left_out: Callable[[Store], Sequence[object]]
) -> None:
    """It is not damage, and nobody asked for it by name."""
    saved.into(store, 10, 20, 30)
    grow_old(store)
    monkeypatch.setattr(RecordStore, "read_bytes", collected_before_read(store, 1))

    with layerstore.open(store.path) as reader:
        assert len(left_out(reader)) == 0


def test_who_asks_for_what_is_collected_meanwhile_is_told_so(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name it is not there any more; the log shows what became of the line that it had begun."""
    saved.into(store, 10, 20, 30)
    grow_old(store)
    monkeypatch.setattr(RecordStore, "read_bytes", collected_before_read(store, 1))

    with layerstore.open(store.path) as reader, pytest.raises(NotFound, match=r"r@20 .* removed by a collection"):
        reader.show("r@20")
    monkeypatch.undo()
    store.ingest(saved(40), run="r")
    monkeypatch.setattr(RecordStore, "read_bytes", collected_before_read(store, 1))

    with layerstore.open(store.path) as reader:
        newest, gone = reader.log("r")
    assert newest.damage is None
    assert gone.damage is not None
    assert "was removed by a collection" in gone.damage


@pytest.mark.fault(51)
def test_who_is_refused_leaves_no_trap(store: Store, saved: Checkpoints) -> None:
    """One object is gone: neither the first who inherits, nor the second, may believe the blob that names it."""
    saved.into(store, 10, 20)
    grow_old(store)
    old = looked_up(store, "r@10")
    repo = open_repository(store.path, Files())
    held = {stored.id for entry in old.record.layers for stored in repo.version(entry.version).objects}
    told: list[bool] = []

    def inherit_twice() -> None:
        next(path for path in (store.path / "gc" / "aside").iterdir() if path.name in held).unlink()
        told.extend(pinned(store, name, old) for name in ("one", "two"))

    with Store(store.path, hook=once("unlink", "aside", inherit_twice)) as collecting:
        collect(collecting, FIRST, grace_seconds=None)

    assert told == [False, False]
    assert store.verify().ok


@pytest.mark.fault(12, 51)
def test_a_blob_at_its_place_says_that_its_objects_are_not_going(store: Store, saved: Checkpoints) -> None:
    """Also where an earlier collection was stopped between the two: somebody claims the blob, and looks no further."""
    saved.into(store, 10, 20)
    grow_old(store)
    old = looked_up(store, "r@10")
    moved: list[str] = []

    def stop_between(doing: str, path: Path) -> None:
        if doing == "rename" and "aside" in path.parts:
            if path.name in blobs_of(old.record) and moved:
                stop()
            moved.append(path.name)

    with Store(store.path, hook=stop_between) as stopped, pytest.raises(Stopped):
        collect(stopped, FIRST, grace_seconds=None)
    told: list[bool] = []
    claim = once("mkdir", "aside", lambda: told.append(pinned(store, "kept", old)))
    with Store(store.path, hook=claim) as collecting:
        collect(collecting, grace_seconds=None)

    assert len(told) == 1
    assert store.verify(read_data=True).ok


def test_what_cannot_be_read_just_now_is_not_taken_for_unneeded(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blob that was claimed meanwhile and fails to be read once: nothing that it names goes."""
    saved.into(store, 10, 20)
    grow_old(store)
    old = looked_up(store, "r@10")
    failed: list[str] = []
    read = ObjectStore.read

    def once_not(objects: ObjectStore, ref: BlobRef) -> bytes:
        if told and not failed and ref.id in blobs_of(old.record):
            failed.append(ref.id)
            raise StorageIO("cannot read it", errno=errno.EIO, filename="blob")
        return read(objects, ref)

    told: list[bool] = []
    monkeypatch.setattr(ObjectStore, "read", once_not)
    claim = once("unlink", "commits", lambda: told.append(pinned(store, "kept", old)))
    with Store(store.path, hook=claim) as collecting, contextlib.suppress(StorageIO):
        collect(collecting, FIRST, grace_seconds=None)

    assert (len(told), len(failed)) == (1, 1)
    assert store.verify(read_data=True).ok
    collect(store, FIRST, grace_seconds=None)
    assert store.verify(read_data=True).ok
    assert len(store.pins()) == 1


@pytest.mark.fault(12, 51)
def test_what_is_linked_back_is_young_again(store: Store, saved: Checkpoints) -> None:
    """An ingest reuses what a stopped collection had moved aside; the next one lets it be."""
    saved.into(store, 10, 20)
    grow_old(store)
    with Store(store.path, hook=once("unlink", "aside", stop)) as stopped, pytest.raises(Stopped):
        collect(stopped, FIRST, grace_seconds=None)

    def collect_again() -> None:
        with layerstore.open(store.path) as other:
            collect(other, grace_seconds=None)

    with Store(store.path, hook=once("link", "commits", collect_again)) as writing:
        writing.ingest(saved(10), run="again")

    assert store.verify(read_data=True).ok


def failed(session: str, save: int) -> Part:
    """Return a part of a rank that has failed."""
    return Part(
        session=session,
        save=save,
        rank=0,
        agreement="",
        layers=(),
        state=None,
        bytes_new=0,
        bytes_reused=0,
        failure="its disk is full",
    )


def test_a_session_that_comes_to_life_keeps_its_new_part(store: Store, saved: Checkpoints) -> None:
    """Only parts that are old themselves go."""
    store.ingest(saved(10), run="r")
    session = store.path / "parts" / ("a" * 32)
    for save in (1, 2):
        store.repo.parts.publish(failed(session.name, save))
    for path in (*session.iterdir(), session):
        os.utime(path, (1, 1))

    with Store(store.path, hook=once("unlink", "parts", (session / "2.0").touch)) as collecting:
        collect(collecting, grace_seconds=None)

    assert [path.name for path in session.iterdir()] == ["2.0"]


# -- collections that were stopped ---------------------------------------------------------------------------------


@pytest.mark.fault(106)
def test_on_a_network_filesystem_objects_wait_aside(
    store: Store, saved: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a collection that comes a grace age later: another node's listing may be late."""
    monkeypatch.setattr(trash, "network_filesystem", lambda path: "nfs")
    saved.into(store, 10, 20)
    before = sum(objects(store).values())
    grow_old(store)

    first = collect(store, FIRST, grace_seconds=None)
    second = collect(store, grace_seconds=None)
    monkeypatch.setattr(Aside, "moved_ns", lambda *_: 0)  # as if the grace had passed
    third = collect(store, grace_seconds=None)

    freed = before - sum(objects(store).values())
    assert (first.bytes_freed, first.waiting.size_bytes) == (0, freed)
    assert (second.bytes_freed, second.waiting.size_bytes) == (0, freed)
    assert (third.bytes_freed, third.waiting.size_bytes) == (freed, 0)
    assert list((store.path / "gc" / "aside").iterdir()) == []


# -- what is not forgotten -----------------------------------------------------------------------------------------


def test_composites_do_without_what_is_collected(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """Newer saves stand in, also across a fork."""
    store.ingest(saved(10), run="r")
    store.ingest(saved(20), run="r")
    store.ingest(saved(30), run="r", resumed_from="r@20")
    before = store.compose("r@30", policy="parity")
    store.ingest(saved(10), run="by parity", policy="parity")

    collect(store, FIRST)

    assert 20 in {choice.step for choice in before.layers.values()}
    after = store.compose("r@30", policy="parity")
    assert {choice.step for choice in after.layers.values()} == {30}
    after.write(tmp_path / "out")


@pytest.mark.parametrize("kind", ["record", "pin"])
def test_damage_that_the_second_look_finds_is_told_as_it_is(store: Store, saved: Checkpoints, kind: str) -> None:
    """By then records are gone, and objects lie aside: nobody is told that nothing was removed."""
    saved.into(store, 10, 20)
    new: dict[Path, bytes] = {}

    def save_and_damage() -> None:
        with layerstore.open(store.path) as other:
            other.ingest(saved(30), run="r", pin="p")
        [record] = (store.path / "commits" / "r").glob("30.*") if kind == "record" else [store.path / "pins" / "p"]
        new[record] = record.read_bytes()
        record.write_bytes(new[record][:-1])

    hook = once("mkdir", "aside", save_and_damage)
    with Store(store.path, hook=hook) as collecting, pytest.raises(IntegrityError) as caught:
        collect(collecting, FIRST)

    assert "nothing was removed" not in str(caught.value)
    assert str(caught.value).endswith("; objects due for removal stay aside until a gc succeeds")
    for record, data in new.items():
        record.write_bytes(data)
    collect(store, FIRST)
    assert store.verify(read_data=True).ok
    assert store.verify().orphans == 0


@pytest.mark.parametrize(("is_export", "policy"), [(False, "latest"), (True, "parity")])
def test_a_composite_that_is_collected_while_it_is_read_is_no_damage(
    store: Store, saved: Checkpoints, tmp_path: Path, is_export: bool, policy: str
) -> None:
    """The error says what happened, and nothing is left at the target; a lost object is damage as before."""
    saved.into(store, 10, 20, 30)
    going = store.compose("r@20" if policy == "latest" else "r@30", policy=policy)
    write = going.export if is_export else going.write

    collect(store, FIRST)

    with pytest.raises(Conflict, match="needs was removed meanwhile"):
        write(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    kept = store.compose("r@30")
    (store.path / "objects" / kept.layers["lm_head"].version[:2] / kept.layers["lm_head"].version).unlink()
    with pytest.raises(IntegrityError):
        kept.write(tmp_path / "out")


def test_a_commit_that_is_collected_as_soon_as_it_is_saved_was_saved(store: Store, saved: Checkpoints) -> None:
    """No rule keeps what is filled in below the newest: whoever saved it is not told of damage."""
    saved.into(store, 10, 30)

    def collect_it() -> None:
        with layerstore.open(store.path) as other:
            collect(other, FIRST, grace_seconds=None)

    with Store(store.path, hook=once("fsync", "r", collect_it)) as writing:
        assert writing.ingest(saved(20), run="r").is_new

    with layerstore.open(store.path) as fresh:
        assert steps(fresh, "r") == [30]
        assert fresh.verify(read_data=True).ok


@pytest.mark.parametrize("verb", ["drop", "replace"])
def test_a_commit_that_is_dropped_while_a_collection_marks_is_no_damage(
    store: Store, saved: Checkpoints, verb: str
) -> None:
    """It was listed and is gone when it is read: the trash has it, which is marked afterwards."""
    saved.into(store, 10, 20)
    read, mark_records = RecordStore.read, Marks._mark_records
    met: list[object] = []

    def mark(marks: Marks, *arguments: Any, **options: Any) -> None:
        with patch.object(RecordStore, "read", read_late):
            mark_records(marks, *arguments, **options)

    def read_late(records: RecordStore, name: RecordName) -> Commit:
        if not met and name.step == 10:
            met.append(name)
            with layerstore.open(store.path) as other:
                if verb == "drop":
                    other.drop("r@10")
                else:
                    other.ingest(saved(10, seed=3), run="r", replace=True)
        return read(records, name)

    with patch.object(Marks, "_mark_records", mark), layerstore.open(store.path) as collecting:
        collect(collecting, grace_seconds=None, empty_trash=False)

    assert met
    assert len(store.dropped()) == 1
    assert store.verify(read_data=True).ok


def test_who_is_overtaken_leaves_what_another_has_saved_meanwhile(store: Store, saved: Checkpoints) -> None:
    """A writer that finds objects gone undoes its own record, not the same commit that another has written since."""
    met: list[str] = []

    def look_late(transaction: Transaction, called: str) -> None:
        if met:
            return
        met.append(called)
        with layerstore.open(store.path) as other:
            assert not other.ingest(saved(10), run="r").is_new
        raise Overtaken("made up", hint="repeat the command")

    with (
        patch.object(Transaction, "_check_all_there", look_late),
        patch.object(Repository, "lock_run", lambda repo, run: contextlib.nullcontext()),
        layerstore.open(store.path) as writing,
        pytest.raises(Overtaken, match="made up"),
    ):
        writing.ingest(saved(10), run="r")

    assert met
    assert steps(store, "r") == [10]
    assert store.verify(read_data=True).ok


@pytest.mark.fault(49, 51)
@pytest.mark.parametrize("slept", [False, True], ids=["as usual", "longer than the grace"])
def test_a_record_that_is_collected_while_it_is_confirmed(store: Store, saved: Checkpoints, slept: bool) -> None:
    """Its bytes come back by the rename that confirms it: whole as a rule, else the ingest says: repeat it."""
    saved.into(store, 10, 30)
    grow_old(store)
    met: list[bool] = []

    def collect_it(operation: str, path: Path) -> None:
        if operation == "rename" and "commits" in path.parts and not met:
            met.append(True)
            if slept:
                grow_old(store)
            with layerstore.open(store.path) as other:
                assert len(collect(other, FIRST, grace_seconds=None).removed) == 1

    with Store(store.path, hook=collect_it) as writing:
        if slept:
            with pytest.raises(Conflict, match="were removed while it was written"):
                writing.ingest(saved(10), run="r")
        else:
            assert not writing.ingest(saved(10), run="r").is_new

    assert met
    with layerstore.open(store.path) as fresh:
        assert steps(fresh, "r") == [30, 10]
        assert fresh.verify().ok is not slept
        assert not fresh.ingest(saved(10), run="r").is_new
        assert fresh.verify(read_data=True).ok
