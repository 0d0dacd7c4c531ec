"""Promises about the history of a run: numbers, pins and commits that others make meanwhile."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from layerstore.errors import AlreadyExists, InvalidInput
from layerstore.storage.rooms import Rooms
from layerstore.storage.setup import open_rooms
from layerstore.storage.commits import RecordStore
from layerstore.storage.files import Files
from layerstore.storage.manifest import Manifest
from tests.unit import samples
from tests.unit.test_verbs import checkpoint, snapshot


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a new store."""
    with layerstore.init(tmp_path / "store") as made:
        yield made


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[Rooms]:
    """Return the rooms, opened afresh, of a store with the commit of step 2, indexed."""
    made = samples.rooms(tmp_path / "store")
    made.records.publish(samples.commit(samples.record(step=2)))
    made.catalog.view("sft")
    made.catalog.close()
    again = open_rooms(made.layout.root, Files())
    yield again
    again.catalog.close()


# -- numbers -------------------------------------------------------------------------------------------------------


def test_save_numbers_are_given_in_the_order_of_saving(store: Store, tmp_path: Path) -> None:
    """What is filled in later comes later in the count, and no number is given twice."""
    for step in (4, 2, 6):
        store.ingest(checkpoint(tmp_path, step=step))

    assert {step: store.show(f"sft@{step}").save_number for step in (4, 2, 6)} == {4: 0, 2: 1, 6: 2}


def test_a_replacement_keeps_the_number_of_its_step(store: Store, tmp_path: Path) -> None:
    """It is the same save, with other content; the next one counts on."""
    for step, seed in ((2, 0), (4, 0), (2, 1), (6, 0)):
        store.ingest(checkpoint(tmp_path / f"{seed}", step=step, seed=seed), replace=True)

    assert {step: store.show(f"sft@{step}").save_number for step in (2, 4, 6)} == {2: 0, 4: 1, 6: 2}


# -- pins ----------------------------------------------------------------------------------------------------------


def test_a_taken_pin_stops_an_ingest_before_anything_is_committed(store: Store, tmp_path: Path) -> None:
    """Nobody is left with a commit and without the pin that was asked for."""
    store.ingest(checkpoint(tmp_path), pin="best")
    before = snapshot(store)

    with pytest.raises(AlreadyExists, match="pin 'best' means sft@2 already"):
        store.ingest(checkpoint(tmp_path, step=4), pin="best")

    assert before == snapshot(store)


def test_a_pin_called_like_its_run_stops_an_ingest(store: Store, tmp_path: Path) -> None:
    """One name cannot mean both, and nothing is committed."""
    before = snapshot(store)

    with pytest.raises(InvalidInput, match="cannot name both the run and a pin"):
        store.ingest(checkpoint(tmp_path), pin="sft")

    assert before == snapshot(store)


def test_repeating_an_ingest_with_its_pin_changes_nothing(store: Store, tmp_path: Path) -> None:
    """A script that is run again finds its pin in place."""
    source = checkpoint(tmp_path)
    first = store.ingest(source, pin="best")
    before = snapshot(store)

    again = store.ingest(source, pin="best")

    assert (first.commit, False) == (again.commit, again.is_new)
    assert before == snapshot(store)


# -- others --------------------------------------------------------------------------------------------------------


def then_once(look: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    """Return *look*, but for *act* that happens right after its first answer."""
    pending = [act]

    def looking(*args: Any, **options: Any) -> Any:
        answer = look(*args, **options)
        if pending:
            pending.pop()()
        return answer

    return looking


@pytest.mark.parametrize(("owner", "look"), [(Manifest, "rows"), (RecordStore, "listing")])
def test_a_commit_that_is_published_meanwhile_has_not_vanished(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch, owner: type, look: str
) -> None:
    """Between the index and the listing, or right after both: at worst it is not seen yet."""

    def publish() -> None:
        commit = samples.commit(samples.record(step=4, save_number=1))
        rooms.records.publish(commit)
        rooms.catalog.add(commit)

    monkeypatch.setattr(owner, look, then_once(getattr(owner, look), publish))

    view = rooms.catalog.view("sft")

    assert view.damaged == {}
    assert {2} <= {row.step for row in view.visible} <= {2, 4}
    assert [row.step for row in rooms.catalog.view("sft").visible] == [2, 4]
