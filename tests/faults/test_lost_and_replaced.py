"""Promises of an ingest at a step that has lost a commit: what it may hide, what comes back, and what it says."""

import dataclasses
import errno
import shutil
from pathlib import Path

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import Conflict, IntegrityError, StorageIO
from layerstore.format.canonical import pack, unpack
from layerstore.format.envelope import Envelope, seal, unseal
from layerstore.format.hashing import digest
from layerstore.model import BlobRef, ObjectId
from layerstore.check import given_up
from layerstore.ingest.execute import execute_ingest
from layerstore.ingest.plan import plan_ingest
from layerstore.progress import Silent
from layerstore.history.references import resolve
from layerstore.storage.rooms import Rooms
from layerstore.storage.setup import open_rooms
from layerstore.storage.commits import RecordName
from layerstore.storage.files import Files
from layerstore.storage.handles import OpenFile
from layerstore.storage.objects import ObjectWriter
from tests.generated import generate


@pytest.fixture(scope="module")
def pristine(fast_module_path: Path) -> Path:
    """Return a folder with checkpoints by step and ``other``, of step 20 too, and a store with r@10 to r@30."""
    for name, step, seed in (("10", 10, 10), ("20", 20, 20), ("30", 30, 30), ("other", 20, 7), ("third", 20, 8)):
        generate(fast_module_path / name, layers=2, hidden=8, vocab=8, step=step, seed=seed)
    with layerstore.init(fast_module_path / "store") as made:
        for step in (10, 20, 30):
            made.ingest(fast_module_path / str(step), run="r")
    return fast_module_path


def record_of(store: Store, ref: str) -> Path:
    """Return the file of the record that *ref* means."""
    record = resolve(store.rooms, ref)
    return store.path / "commits" / "r" / f"{record.record.step}.{record.commit}"


def lose(store: Store, path: Path) -> str:
    """Let a record rot where nobody has a copy of it, and take it to quarantine; return its commit's id."""
    path.write_bytes(b"rot")
    shutil.rmtree(store.path / "manifest")
    with layerstore.open(store.path) as fresh:
        assert fresh.repair().held_back
    return path.name.split(".")[1]


def shown(store: Store, step: int) -> list[str]:
    """Return the visible commits of *step*."""
    return [entry.commit for entry in store.log() if entry.step == step]


class _Refusing(Files):
    """Cannot open *path*, for a reason that says nothing of what is there."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def open(self, path: Path) -> OpenFile:
        """Open *path*, unless it is the one."""
        if path == self._path:
            raise StorageIO("permission denied", errno=errno.EACCES, filename=str(path))
        return super().open(path)


# -- what may be hidden --------------------------------------------------------------------------------------------


@pytest.mark.fault(85)
def test_a_replacement_does_not_hide_what_a_newer_layerstore_saved(store: Store, folder: Path) -> None:
    """It is sound, and not known to this version: neither lost nor replaced."""
    path = record_of(store, "r@20")
    payload = unpack(
        unseal(path.read_bytes(), name=path.relative_to(store.path).as_posix(), store_id=store.id).payload, what="x"
    )
    assert isinstance(payload, dict)
    payload["body"]["flags"] = ["from-the-future"]  # type: ignore[index,call-overload]  # a record is a map of maps
    newer = digest(pack(payload["body"])).hex()
    name = f"commits/r/20.{newer}"
    (store.path / name).write_bytes(seal(Envelope(store_id=store.id, name=name, payload=pack(payload))))
    with layerstore.open(store.path) as fresh:
        assert given_up.lost_at(fresh.rooms, "r", 20) == []

        saved = fresh.ingest(folder / "other", run="r", replace=True)

        record = fresh.rooms.records.read(RecordName("r", 20, saved.commit)).record
        assert newer not in record.supersedes
        assert not [note for note in saved.notes if newer[:12] in note]


@pytest.mark.fault(44)
def test_a_replacement_beside_a_record_that_cannot_be_read_just_now_is_refused(store: Store, folder: Path) -> None:
    """Another user's permissions are no loss: nothing is hidden, nothing is written."""
    path = record_of(store, "r@20")
    shutil.rmtree(store.path / "manifest")
    before = sorted(each.name for each in path.parent.iterdir())
    rooms = open_rooms(store.path, _Refusing(path))
    try:
        plan = plan_ingest(rooms, folder / "other", run="r", replace=True)
        with pytest.raises(StorageIO) as caught:
            execute_ingest(rooms, plan, progress=Silent())
    finally:
        rooms.catalog.close()

    assert caught.value.errno == errno.EACCES
    assert sorted(each.name for each in path.parent.iterdir()) == before


@pytest.mark.fault(44)
def test_what_is_lost_elsewhere_is_not_looked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with many damaged records is not searched once for each of them: only for those of the step."""
    paths = [record_of(store, ref) for ref in ("r@10", "r@20", "r@30")]
    shutil.rmtree(store.path / "manifest")
    for path in paths:
        path.write_bytes(b"rot")
    asked: list[int] = []
    is_hidden = given_up.is_hidden

    def counted(rooms: Rooms, name: RecordName) -> bool:
        asked.append(name.step)
        return is_hidden(rooms, name)

    monkeypatch.setattr(given_up, "is_hidden", counted)
    with layerstore.open(store.path) as fresh:
        assert [name.step for name in given_up.lost_at(fresh.rooms, "r", 20)] == [20]
    assert asked == [20]


@pytest.mark.fault(44, 91)
@pytest.mark.parametrize("rollback", [False, True], ids=["known by the index", "rolled back"])
def test_a_replacement_hides_no_lost_commit_of_another_attempt(store: Store, folder: Path, *, rollback: bool) -> None:
    """The index knows of which attempt the lost one was; and what opens an attempt replaces nothing."""
    first = record_of(store, "r@20")
    store.ingest(folder / "other", run="r", rollback=True)
    first_id = first.name.split(".")[1]
    if rollback:
        lose(store, first)
    else:
        first.unlink()
    with layerstore.open(store.path) as fresh:
        saved = fresh.ingest(folder / "third", run="r", replace=True, rollback=rollback)

        assert saved.attempt == (3 if rollback else 2)
        assert first_id not in fresh.rooms.records.read(RecordName("r", 20, saved.commit)).record.supersedes
        with pytest.raises(IntegrityError):
            fresh.gc(grace_seconds=0)


# -- what comes back -----------------------------------------------------------------------------------------------


@pytest.mark.fault(44, 91)
def test_a_lost_commit_does_not_come_back_beside_what_was_saved_in_its_place(store: Store, folder: Path) -> None:
    """Two commits side by side mean nothing: the user says which one it is to be, and one shows at any time."""
    sound = store.compose("r@20").tensors()
    lost_id = lose(store, record_of(store, "r@20"))
    with layerstore.open(store.path) as fresh:
        other = fresh.ingest(folder / "other", run="r")

        with pytest.raises(Conflict, match=f"{lost_id[:12]}.*{other.commit[:12]}.*nothing was changed") as caught:
            fresh.ingest(folder / "20", run="r")
        assert "--replace" in (caught.value.hint or "")
        assert shown(fresh, 20) == [other.commit]

        saved = fresh.ingest(folder / "20", run="r", replace=True)

        assert shown(fresh, 20) == [saved.commit]
        assert set(resolve(fresh.rooms, "r@20").record.supersedes) == {lost_id, other.commit}
        assert {name: each.tobytes() for name, each in fresh.compose("r@20").tensors().items()} == {
            name: each.tobytes() for name, each in sound.items()
        }
        assert fresh.compose("r@30", policy="parity").layers
        assert fresh.ingest(folder / "20", run="r").commit == saved.commit
        fresh.gc(grace_seconds=0)
        assert (fresh.verify(read_data=True).ok, fresh.verify().quarantined) == (True, ())
        assert shown(fresh, 20) == [saved.commit]


# -- a replacement that fails --------------------------------------------------------------------------------------


def _fail_to_replace(store: Store, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace r@20, and find once the record is there that a collection has taken one of its objects."""
    look_again = ObjectWriter.look_again
    times = iter([[BlobRef(id=ObjectId("0" * 32), size_bytes=1)]])
    with monkeypatch.context() as patched:
        patched.setattr(ObjectWriter, "look_again", lambda writer: next(times, None) or look_again(writer))
        with pytest.raises(Conflict, match="removed while they were committed"):
            store.ingest(source, run="r", replace=True)


def test_what_was_to_be_replaced_shows_again_when_that_fails(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same place, number and content; and the command may be repeated."""
    before = resolve(store.rooms, "r@20").record
    store.drop("r@10")

    _fail_to_replace(store, folder / "other", monkeypatch)

    (again,) = shown(store, 20)
    assert dataclasses.replace(resolve(store.rooms, "r@20").record, supersedes=()) == before
    assert [entry.step for entry in store.log()] == [30, 20]
    assert store.ingest(folder / "20", run="r").commit == again
    store.gc(grace_seconds=0)
    assert (shown(store, 20), store.verify(read_data=True).ok) == ([again], True)
    saved = store.ingest(folder / "other", run="r", replace=True)
    assert shown(store, 20) == [saved.commit]


def test_a_commit_with_holes_shows_again_as_it_was(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other layers can be had as before."""
    entry = resolve(store.rooms, "r@20").record.layers[0]
    store.rooms.layout.object(store.rooms.version_of(entry).objects[0].id).unlink()

    _fail_to_replace(store, folder / "other", monkeypatch)

    assert len(shown(store, 20)) == 1
    (hurt,) = store.verify().damaged
    assert "r@20" in hurt.needed_by


@pytest.mark.fault(44, 91)
def test_what_was_lost_is_lost_again_when_its_replacement_fails(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has it replaced: it holds collections back, and its checkpoint brings it back."""
    lost_id = lose(store, record_of(store, "r@20"))
    with layerstore.open(store.path) as fresh:
        _fail_to_replace(fresh, folder / "other", monkeypatch)

        assert (shown(fresh, 20), fresh.verify().quarantined) == ([], ("r@20",))
        with pytest.raises(IntegrityError, match="r@20 needs is not known"):
            fresh.gc(grace_seconds=0)

        saved = fresh.ingest(folder / "20", run="r")

        assert shown(fresh, 20) == [saved.commit]
        assert lost_id in resolve(fresh.rooms, "r@20").record.supersedes
        fresh.gc(grace_seconds=0)
        assert (fresh.verify(read_data=True).ok, fresh.verify().quarantined) == (True, ())
        assert shown(fresh, 20) == [saved.commit]


# -- what is said --------------------------------------------------------------------------------------------------


@pytest.mark.fault(44, 91)
@pytest.mark.parametrize("how", ["damaged", "vanished"])
def test_a_replacement_of_what_no_repair_has_seen_says_what_comes_first(store: Store, folder: Path, how: str) -> None:
    """A collection does not take what it cannot read, also where it is hidden: a repair has to put it aside."""
    path = record_of(store, "r@20")
    if how == "damaged":
        shutil.rmtree(store.path / "manifest")
        path.write_bytes(b"rot")
    else:
        path.unlink()
    with layerstore.open(store.path) as fresh:
        (note,) = fresh.ingest(folder / "other", run="r", replace=True).notes

        assert "is replaced" in note
        assert "removes nothing until layerstore repair has run" in note
        before = sum(each.is_file() for each in (store.path / "objects").rglob("*"))
        with pytest.raises(IntegrityError):
            fresh.gc(grace_seconds=0)
        assert sum(each.is_file() for each in (store.path / "objects").rglob("*")) == before


@pytest.mark.fault(44, 91)
def test_the_policy_that_brings_a_lost_commit_back_is_named(folder: Path) -> None:
    """Saved under another one it is another commit; what the note says brings it back."""
    with layerstore.init(folder / "selective") as made:
        for step in (10, 20, 30):
            made.ingest(folder / str(step), run="r", policy="parity")
        record = resolve(made.rooms, "r@20").record
        own = next(entry for entry in record.layers if entry.saved_by(record))
        made.rooms.layout.object(made.rooms.version_of(own).objects[0].id).unlink()
        path = record_of(made, "r@20")
    path.unlink()
    with layerstore.open(folder / "selective") as fresh:
        assert fresh.repair().held_back == ("r@20",)

        (note,) = fresh.ingest(folder / "20", run="r").notes

        assert "--replace" in note
        assert "with --policy parity, under which it was saved, it brings it back" in note
        saved = fresh.ingest(folder / "20", run="r", policy="parity", replace=True)
        back = resolve(fresh.rooms, "r@20").record
        assert shown(fresh, 20) == [saved.commit]
        assert dataclasses.replace(back, supersedes=()) == dataclasses.replace(record, supersedes=())
        assert fresh.verify(read_data=True).quarantined == ()
