"""The benchmark of questions asks what it says, of a store that is what it says."""

from pathlib import Path

import pytest

import layerstore
from layerstore.storage import RecordName, RecordStore
from tests.bench.histories import RUN, build, places
from tests.bench.query import _questions


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with a history of sixty commits."""
    folder = tmp_path_factory.mktemp("histories") / "store"
    build(folder, commits=60, layers=5, seed=3)
    return folder


def test_a_made_history_is_a_whole_one(path: Path) -> None:
    """Four attempts, some commits replaced, every record sound and named by its content."""
    with layerstore.open(path) as store:
        entries = store.log()
        found = sorted((entry.attempt, entry.step) for entry in entries)
        records = list((path / "commits" / RUN).iterdir())

        assert found == [(place.attempt, place.step) for place in places(60)]
        assert {entry.attempt for entry in entries} == {1, 2, 3, 4}
        assert all(entry.damage is None and entry.layers_saved == 5 for entry in entries)
        assert len(records) > 60
        assert len(store.ls(RUN)) == 5


@pytest.mark.full
def test_every_question_of_the_benchmark_has_an_answer(path: Path) -> None:
    """None of them times an error."""
    with layerstore.open(path) as store:
        questions = _questions(store, path, commits=60)
        for question in questions:
            question.ask()

    assert [question.name for question in questions if question.bar_ms == 10]


@pytest.mark.parametrize("ref", [RUN, f"{RUN}@100", f"{RUN}~2", f"{RUN}~1@100"])
def test_a_plan_reads_one_record(path: Path, monkeypatch: pytest.MonkeyPatch, ref: str) -> None:
    """However long the history is, finding a commit reads that commit's record and no other."""
    with layerstore.open(path) as store:
        store.compose(RUN)
        read: list[RecordName] = []
        original = RecordStore.read_bytes

        def reading(records: RecordStore, name: RecordName) -> bytes:
            read.append(name)
            return original(records, name)

        monkeypatch.setattr(RecordStore, "read_bytes", reading)
        plan = store.compose(ref)

    assert [(plan.run, plan.step)] == [(name.run, name.step) for name in read]
