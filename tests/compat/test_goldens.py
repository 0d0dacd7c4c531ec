"""Promises to those who have stored something already: ids stay, and stores of every released format open."""

import json
import shutil
from pathlib import Path

import pytest

import layerstore
from layerstore.format.identity import FORMAT
from tests.compat import golden_ids, goldens, history
from tests.compat.checkpoint import build

ARCHIVES = sorted(goldens.STORES.glob("format-*.zip"))
HISTORIES = sorted(goldens.STORES.glob("history-*.zip"))


def test_ids_of_a_fixed_checkpoint_are_pinned(tmp_path: Path) -> None:
    """
    The names of objects, versions, states and commit are those that the format page's rules give, to the last digit.

    Changing one is a change of format: it needs a new format number, a golden store of its own, a migration, and
    a line in the format page's list of changes. Nothing here may be adapted just to make the test pass.
    """
    path = tmp_path / "store"
    with layerstore.init(path) as store:
        commit = store.ingest(build(tmp_path / "sft" / "checkpoint-2")).commit

    assert goldens.object_ids(path, "sft@2") == golden_ids.OBJECTS
    assert goldens.version_ids(path, "sft@2") == golden_ids.VERSIONS
    assert goldens.state_ids(path, "sft@2") == golden_ids.STATES
    assert commit == golden_ids.COMMIT


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def golden_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of each store that an earlier version made."""
    archive: Path = request.param
    return goldens.unpack_store(archive, tmp_path / "store")


def test_there_are_golden_stores() -> None:
    """A missing file would make every promise below hold by silence; a large one does not belong here."""
    assert [archive.stem.split("-")[1] for archive in ARCHIVES] == [archive.stem.split("-")[1] for archive in HISTORIES]
    assert FORMAT in [int(archive.stem.split("-")[1]) for archive in ARCHIVES]
    assert all(archive.stat().st_size < 150_000 for archive in [*ARCHIVES, *HISTORIES])


@pytest.mark.fault(82)
def test_a_golden_store_is_whole(golden_store: Path) -> None:
    """It opens, every byte is as it was written, and nothing of it is unnamed."""
    with layerstore.open(golden_store) as store:
        verdict = store.verify(read_data=True)

        assert verdict.damaged == ()
        assert verdict.orphans == 0
        assert [(entry.run, entry.step, entry.pins) for entry in store.log()] == [("sft", 4, ()), ("sft", 2, ("best",))]


@pytest.mark.fault(82)
@pytest.mark.parametrize("ref", ["sft@2", "best"])
def test_a_golden_store_composes_to_the_same_bytes(golden_store: Path, tmp_path: Path, ref: str) -> None:
    """What was stored then comes out now as it did then, every file of it."""
    with layerstore.open(golden_store) as store:
        assert goldens.composed(store, ref, tmp_path / "out") == golden_ids.COMPOSED


def test_a_golden_store_is_recognised(golden_store: Path, tmp_path: Path) -> None:
    """The same checkpoint, ingested today, is what the store has already; the next step shares what is frozen."""
    with layerstore.open(golden_store) as store:
        assert not store.ingest(build(tmp_path / "sft" / "checkpoint-2")).is_new
        later = store.ingest(build(tmp_path / "sft" / "checkpoint-6", step=6))
        assert later.is_new
        assert later.objects_reused > 0
        assert store.reindex().commits == 3
        assert store.verify(read_data=True).ok


def test_reading_a_golden_store_changes_nothing(golden_store: Path, tmp_path: Path) -> None:
    """Log, show, verify and compose leave every file of the truth as it was."""
    before = {path: path.read_bytes() for path in golden_store.rglob("*") if path.is_file()}
    with layerstore.open(golden_store) as store:
        store.log()
        store.show("sft@2")
        store.verify(read_data=True)
        store.compose("best").write(tmp_path / "out")
    shutil.rmtree(golden_store / "manifest")

    assert before == {path: path.read_bytes() for path in golden_store.rglob("*") if path.is_file()}


@pytest.mark.parametrize("archive", HISTORIES, ids=lambda path: path.stem)
def test_a_golden_history_answers_as_it_did(archive: Path, tmp_path: Path) -> None:
    """Attempts, hidden commits, inherited layers, mixtures, what has lost its moments: all as when it was written."""
    expected = json.loads(archive.with_suffix(".json").read_text())
    with layerstore.open(goldens.unpack_store(archive, tmp_path / "store")) as store:
        assert store.verify(read_data=True).ok
        assert json.loads(json.dumps(history.answers(store, tmp_path))) == expected
