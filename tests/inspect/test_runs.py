"""Promises of ``overview``: each run's newest save, and whether it is whole, without reading tensors or old records."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore import Commit, Store
from layerstore.disk import OpenFile
from layerstore.history import resolve
from layerstore.model import BlobRef
from layerstore.publish import SaveTiming, note_timing
from layerstore.storage import ObjectStore, Stretch
from layerstore.storage.commits import RecordName, RecordStore
from layerstore.tree import Tree
from tests.inspect.made_up import History, build
from tests.inspect.test_diff import BLOCK_1, master_object
from tests.unit.checkpoints import Checkpoints, checkpoint

SECONDS_MAX = 0.5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with two runs; the newest save of r is compact, that of sft was measured."""
    with layerstore.init(tmp_path / "store") as made:
        Checkpoints(tmp_path / "source").into(made, 1, 2, 3, precision="delta8")
        for step in (2, 4):
            metrics: dict[Tree, Tree] = {"metrics": {"loss": 2.0 + step}}
            made.ingest(checkpoint(tmp_path, step=step, client_state=metrics))
        yield made


def timing(step: int, failure: str) -> SaveTiming:
    """Return what a saver notes of a save of sft."""
    return SaveTiming(
        run="sft", attempt=1, step=step, save_number=step, blocked_seconds=0.1, durable_seconds=1.0,
        visible_seconds=None, copied_bytes=1, written_bytes=1, layers_saved=1, layers=2, queued=0, failure=failure,
    )  # fmt: skip


def test_each_run_is_told_by_its_newest_save(store: Store) -> None:
    """The run that was saved last comes first; its figures are those of ``show`` and ``log``."""
    sft, r = store.overview()

    assert (sft.run, sft.step, sft.attempt, sft.saves, sft.metrics) == ("sft", 4, 1, 2, {"loss": 6.0})
    assert (r.run, r.step, r.saves, r.precision, r.policy) == ("r", 3, 3, "delta8", "full")
    for line in (sft, r):
        view = store.show(line.run)
        assert (line.commit, line.size_bytes, line.time) == (view.commit, view.size_bytes, view.time)
        assert (line.precision, line.policy, line.metrics) == (view.precision, view.policy, view.metrics)
        assert (line.is_healthy, line.problems, line.pushed) == (True, (), ())


def test_only_the_newest_records_are_read_and_no_tensor(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index and the listings have the rest."""
    store.overview()
    records = [resolve(store.repo, ref).record for ref in ("r", "sft")]
    versions = [store.repo.version_of(entry) for record in records for entry in record.layers]
    tensors = {stored.id for version in versions for stored in version.named}
    read: list[int] = []
    opened: set[str] = set()
    read_record, open_object = RecordStore.read, ObjectStore.open

    def noted(self: RecordStore, name: RecordName) -> Commit:
        read.append(name.step)
        return read_record(self, name)

    def noted_object(self: ObjectStore, ref: BlobRef, stretches: Iterable[Stretch] | None = None) -> OpenFile:
        opened.add(ref.id)
        return open_object(self, ref, stretches)

    monkeypatch.setattr(RecordStore, "read", noted)
    monkeypatch.setattr(ObjectStore, "open", noted_object)
    with layerstore.open(store.path) as afresh:
        afresh.overview()

    assert sorted(read) == [3, 4]
    assert opened
    assert not opened & tensors


def test_a_save_that_is_not_whole_is_a_problem(store: Store) -> None:
    """An object that is gone, or cut short; the other run is healthy, and so is it before."""
    path = master_object(store, "sft@4", BLOCK_1)
    data = path.read_bytes()
    path.chmod(0o644)

    path.write_bytes(data[:-1])
    cut = store.overview()
    path.unlink()
    gone = store.overview()

    for sft, r in (cut, gone):
        assert sft.problems == ("1 of 5 layers of step 4 is not intact",)
        assert r.is_healthy
    assert "1 of 5 layers" in repr(gone[0])


def test_a_record_that_cannot_be_read_is_a_problem(store: Store) -> None:
    """Whether it is the newest one, or the only ones; then nothing is known but that."""
    [newest] = (store.path / "commits" / "sft").glob("4.*")
    newest.chmod(0o644)
    newest.write_bytes(b"damaged")
    with layerstore.open(store.path) as afresh:
        afresh.reindex()
        [line] = [line for line in afresh.overview() if line.run == "sft"]
    assert (line.step, line.saves, line.problems) == (2, 1, ("the record of step 4 is damaged",))

    [older] = (store.path / "commits" / "sft").glob("2.*")
    older.chmod(0o644)
    older.write_bytes(b"damaged")
    with layerstore.open(store.path) as afresh:
        afresh.reindex()
        lines = afresh.overview()
    assert [(line.run, line.step, line.saves, line.time) for line in lines[1:]] == [("sft", None, 0, None)]
    assert not lines[1].is_healthy


def test_saves_that_failed_since_are_a_problem(store: Store) -> None:
    """Those before the newest commit are not: a later save made up for them."""
    note_timing(store.repo, "0" * 32, timing(3, "the disk is full"))
    before = store.overview()[0]
    for step in (5, 6):
        note_timing(store.repo, "0" * 32, timing(step, f"no space at {step}"))
    since = store.overview()[0]

    assert before.is_healthy
    assert since.problems == ("2 saves have failed since step 4, the last at step 6: no space at 6",)


def test_how_far_a_run_was_pushed(store: Store, tmp_path: Path) -> None:
    """To every remote that is named; the same lines come from the remote itself."""
    url = (tmp_path / "bucket").as_uri()
    store.remotes.add("origin", url)
    never = store.overview()[0].pushed
    store.push("origin")
    pushed = store.overview()[0].pushed
    with layerstore.open(url) as bucket:
        there = [(line.run, line.step, line.size_bytes, line.is_healthy) for line in bucket.overview()]
        here = [(line.run, line.step, line.size_bytes, line.is_healthy) for line in store.overview()]
    store.ingest(checkpoint(tmp_path, step=6))
    behind = store.overview()[0].pushed

    assert [(of.remote, of.step) for of in never] == [(url, None)]
    assert [(of.remote, of.step) for of in pushed] == [(url, 4)]
    assert [(of.remote, of.step) for of in behind] == [(url, 4)]
    assert here == there


def test_a_store_without_runs_has_no_line(tmp_path: Path) -> None:
    """It says why."""
    with layerstore.init(tmp_path / "empty") as empty:
        assert empty.overview() == []
        assert "no runs yet" in repr(empty.overview())


@pytest.mark.full
def test_thousands_of_saves_take_no_time(tmp_path: Path) -> None:
    """Once the index has them; each look opens the store anew."""
    build(tmp_path / "store", History(run="long", saves=3000, layers=34), History(run="b", saves=300, is_live=True))
    with layerstore.open(tmp_path / "store") as long:
        long.overview()

    def look() -> float:
        begun = time.process_time()
        with layerstore.open(tmp_path / "store") as long:
            assert [line.saves for line in long.overview()] == [3000, 300]
        return time.process_time() - begun

    assert any(look() < SECONDS_MAX for _ in range(5))
