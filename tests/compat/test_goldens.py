"""Promises to those who have stored something already: ids stay, and stores of every format open, or migrate."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.errors import Unsupported
from layerstore.format import FORMAT
from layerstore.migrations import migrate
from tests.compat import goldens, history

IDS = json.loads(goldens.IDS.read_text())
ARCHIVES = sorted(goldens.STORES.glob("format-*.zip"))
HISTORIES = sorted([*goldens.STORES.glob("history-*.zip"), *goldens.STORES.glob("dropped-*.zip")])


def number_of(archive: Path) -> int:
    """Return the format of the store in *archive*."""
    return int(archive.stem.split("-")[1])


def unpacked(archive: Path, path: Path) -> Path:
    """Unpack the store in *archive* into *path* and take it to today's format."""
    goldens.unpack_store(archive, path)
    if number_of(archive) != FORMAT:
        with pytest.raises(Unsupported, match=f"format {number_of(archive)}") as caught:
            layerstore.open(path)
        assert caught.value.hint == "layerstore migrate"
        migrate(goldens.collected(path))
    return path


def test_ids_of_a_fixed_checkpoint_are_pinned(tmp_path: Path) -> None:
    """
    The names of objects, versions, states and commit are those that the format page's rules give, to the last digit.

    Changing one is a change of format: it needs a new format number, a golden store of its own, a migration, and
    a line in the format page's list of changes. Nothing here may be adapted just to make the test pass.
    """
    path = tmp_path / "store"
    with layerstore.init(path) as store:
        store.ingest(goldens.checkpoint(tmp_path / "sft" / "checkpoint-2"))

    assert goldens.ids_of(path, "sft@2") | {"composed": IDS["composed"]} == IDS


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def golden_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of each store that an earlier version made, migrated."""
    return unpacked(request.param, tmp_path / "store")


def test_there_are_golden_stores() -> None:
    """A missing file would make every promise below hold by silence; a large one does not belong here."""
    assert {number_of(archive) for archive in ARCHIVES} == {number_of(archive) for archive in HISTORIES}
    assert {number_of(archive) for archive in ARCHIVES} == set(range(1, FORMAT + 1))
    assert all(archive.stat().st_size < 300_000 for archive in [*ARCHIVES, *HISTORIES])


@pytest.mark.fault(82)
def test_a_golden_store_is_whole_and_composes_to_the_same_bytes(golden_store: Path, tmp_path: Path) -> None:
    """It opens, what was stored comes out as it did then, and to look at it changes nothing."""
    before = {path: path.read_bytes() for path in golden_store.rglob("*") if path.is_file()}
    with layerstore.open(golden_store) as store:
        verdict = store.verify(read_data=True)

        assert (verdict.damaged, verdict.orphans) == ((), 0)
        assert [(entry.run, entry.step, entry.pins) for entry in store.log()] == [("sft", 4, ()), ("sft", 2, ("best",))]
        assert store.show("best").commit == IDS["commit"]
        for ref in ("sft@2", "best"):
            assert goldens.composed(store, ref, tmp_path / ref) == IDS["composed"]
    shutil.rmtree(golden_store / "manifest")
    assert before == {path: path.read_bytes() for path in golden_store.rglob("*") if path.is_file()}


def test_a_golden_store_is_recognised(golden_store: Path, tmp_path: Path) -> None:
    """The same checkpoint, ingested today, is what the store has already; the next step shares what is frozen."""
    with layerstore.open(golden_store) as store:
        assert not store.ingest(goldens.checkpoint(tmp_path / "sft" / "checkpoint-2")).is_new
        later = store.ingest(goldens.checkpoint(tmp_path / "sft" / "checkpoint-6", step=6))
        assert later.is_new
        assert later.objects_reused > 0
        assert store.reindex() == 3
        assert store.verify(read_data=True).ok


@pytest.mark.parametrize("archive", HISTORIES, ids=lambda path: path.stem)
def test_a_golden_history_answers_as_it_did(archive: Path, tmp_path: Path) -> None:
    """Attempts, hidden commits, inherited layers, mixtures, what has lost its moments: all as when it was written."""
    expected = json.loads(archive.with_suffix(".json").read_text())
    with layerstore.open(unpacked(archive, tmp_path / "store")) as store:
        assert store.verify(read_data=True).ok
        answers = json.loads(json.dumps(history.answers(store, tmp_path, expected["references"])))

    if number_of(archive) != FORMAT:
        answers, expected = without_ids(answers), without_ids(expected)
    assert answers == {name: expected[name] for name in answers}


def without_ids(answers: dict[str, Any]) -> dict[str, Any]:
    """Return *answers* without what a migration may change: ids of commits, and how policies are replayed since."""
    references = {
        ref: [shown["place"], shown["layers"]] if isinstance(shown, dict) else shown
        for ref, shown in answers["references"].items()
    }
    return {
        "log": [[run, attempt, step, saved] for run, attempt, step, _, saved in answers["log"]],
        "pins": [name for name, _ in answers["pins"]],
        "references": references,
        "composites": {
            name: digest for name, digest in answers["composites"].items() if name.endswith((" latest", " exact"))
        },
    }
