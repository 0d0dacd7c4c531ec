"""Ranks that save together beside a collection: what parts name stays, and a save whose parts went is given up."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import layerstore
from layerstore.gc.mark import Marks
from layerstore.history import NextCommit
from layerstore.limits import GC_UNFINISHED_GRACE_SECONDS
from layerstore.model import Commit
from layerstore.parts import Part
from layerstore.publish.rank_parts import GivenUp, join
from layerstore.storage.parts import PartStore
from layerstore.store import Store
from tests.faults.saving import Save, begun
from tests.gc.test_gc import collect, grow_old, once
from tests.generated import generate

DAYS_AGO = time.time() - 2 * GC_UNFINISHED_GRACE_SECONDS


def saving(store: Store, folder: Path) -> Save:
    """Begin a save of two ranks."""
    checkpoint = generate(folder / "checkpoint", layers=1, hidden=8, vocab=16, step=1)
    return begun(store, checkpoint, session="0" * 32, place=NextCommit.begun(None), step=1)


def grow_idle(store: Store) -> None:
    """Let the ranks have slept for days: nothing protects what they have written but their parts, which are idle."""
    grow_old(store)
    for path in (store.path / "parts").rglob("*"):
        os.utime(path, (DAYS_AGO, DAYS_AGO))


def collected_by_another(store: Store, make_old: Callable[[Store], None]) -> None:
    """Collect in another process, so to say, after *make_old*."""
    make_old(store)
    with layerstore.open(store.path) as other:
        collect(other, grace_seconds=None)


@pytest.fixture
def written(store: Store, tmp_path: Path) -> Save:
    """Return a save of which all parts are there."""
    save = saving(store, tmp_path)
    save.write_all()
    return save


def joined(save: Save, parts: list[Part]) -> Commit:
    """Join *parts*, which were read before something else happened."""
    return join(save.store.repo, save.joint, parts, inherited={}, own=set())


@pytest.mark.fault(49, 51)
def test_what_a_draft_names_stays(store: Store, tmp_path: Path) -> None:
    """A rank sleeps between its look and its part: its draft protects what it has looked at."""
    with Store(store.path, hook=once("rename", "parts", lambda: collected_by_another(store, grow_old))) as hooked:
        save = saving(hooked, tmp_path)
        save.write_all()
        save.finish()

        assert hooked.verify(read_data=True).ok
        assert list((store.path / "parts").iterdir()) == []


def test_a_draft_that_becomes_a_part_while_it_is_read_is_marked(store: Store, tmp_path: Path) -> None:
    """A collection has listed it as a draft, and finds it under its new name."""
    save = saving(store, tmp_path)
    save.write_all()
    session, read = save.joint.session, PartStore._read

    def renamed(self: PartStore, path: Path, *where: Any) -> Part | None:
        if path.suffix == ".draft":
            path.rename(path.with_suffix(""))
        return read(self, path, *where)

    for path in (store.path / "parts" / session).iterdir():
        path.rename(path.with_name(f"{path.name}.draft"))
    with patch.object(PartStore, "_read", renamed):
        assert len(store.repo.parts.of_session(session)) == 2


def test_a_rank_whose_draft_was_idle_leaves_no_part(store: Store, tmp_path: Path) -> None:
    """A collection has removed it, and what it names: there is nothing to make a part of."""
    with Store(store.path, hook=once("rename", "parts", lambda: collected_by_another(store, grow_idle))) as hooked:
        save = saving(hooked, tmp_path)
        with pytest.raises(layerstore.LayerstoreError):
            save.write(0)

        assert hooked.repo.parts.ranks(save.joint.session, save.joint.save) == set()


@pytest.mark.fault(49, 51)
def test_a_save_that_was_idle_is_given_up(store: Store, tmp_path: Path, written: Save) -> None:
    """The first rank has read the parts, and slept for days: it looks at them once more, and they are gone."""
    parts = written.parts()
    collected_by_another(store, grow_idle)

    with pytest.raises(GivenUp, match="gc removed the share of rank 0"):
        joined(written, parts)

    assert (store.runs(), store.verify(read_data=True).ok) == ([], True)


def removing(place: str, action: Callable[[], object]) -> Any:
    """Return a patch that does *action* when a collection is about to remove idle parts, or to mark again."""
    owner: type = {"look": Marks, "remove_session": PartStore}[place]
    real, looks = getattr(owner, place), list[object]()

    def slow(self: Any, *words: Any, **options: Any) -> Any:
        looks.append(None)
        if len(looks) == (2 if place == "look" else 1):
            action()
        return real(self, *words, **options)

    return patch.object(owner, place, slow)


@pytest.mark.fault(49, 51)
@pytest.mark.parametrize("place", ["remove_session", "look"])
def test_the_record_or_the_parts_are_seen(store: Store, written: Save, place: str) -> None:
    """The first rank wakes up while the parts of its session are removed as idle: the save is whole, or given up."""
    parts, found = written.parts(), list[object]()
    grow_idle(store)

    def wake_up() -> None:
        try:
            found.append(joined(written, parts))
        except GivenUp as exc:
            found.append(exc)

    with removing(place, wake_up), layerstore.open(store.path) as other:
        collect(other, grace_seconds=None)

    assert [type(each) for each in found] == [Commit if place == "remove_session" else GivenUp]
    assert store.runs() == (["run"] if place == "remove_session" else [])
    assert store.verify(read_data=True).ok
