"""Parts whose objects vanish: of two ranks that hold what a checkpoint holds, in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import layerstore
from layerstore.disk import stream
from layerstore.errors import Conflict
from layerstore.history import Place
from layerstore.limits import PAGE_BYTES
from layerstore.model import ObjectId, Part
from layerstore.publish.rank_parts import GivenUp, fail_share
from layerstore.store import Store
from tests.faults.saving import Save, begun
from tests.generated import generate


class Saves:
    """Two ranks' saves of the same layers, one after another, and the store that they go to."""

    def __init__(self, folder: Path) -> None:
        """Make the store."""
        layerstore.init(folder / "store").close()
        self._checkpoint = generate(folder / "checkpoint", layers=2, hidden=8, vocab=16, step=1)
        self.hook: Callable[[str, Path], None] | None = None
        self.store = Store(folder / "store", hook=self._hook)

    def _hook(self, operation: str, path: Path) -> None:
        if self.hook is not None:
            self.hook(operation, path)

    def begun(self, number: int) -> Save:
        """Begin the save *number*."""
        return begun(
            self.store, self._checkpoint, session="0" * 32, place=Place.begun(None), step=1 + number, save=number
        )

    def path(self, object_id: ObjectId) -> Path:
        """Return where an object lies."""
        return self.store.repo.layout.object(object_id)


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saves]:
    """Yield two ranks."""
    found = Saves(tmp_path)
    yield found
    found.store.close()


def test_large_objects_of_a_save_go_past_the_cache(saves: Saves, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling the kernel's cache takes time that training needs."""
    monkeypatch.setattr(stream, "STREAM_BYTES", PAGE_BYTES)
    monkeypatch.setattr(stream, "_spare", [])  # so small a buffer is for nobody else
    save = saves.begun(0)
    with patch.object(stream, "bypass_cache", side_effect=stream.bypass_cache) as bypass:
        save.write_all()
    save.join()

    assert True in [call.args[1] for call in bypass.call_args_list]
    assert saves.store.verify(read_data=True).ok


def named(part: Part, which: str) -> ObjectId:
    """Return an object that *part* names."""
    if which == "state":
        assert part.state is not None
        return part.state.id
    return next(stored.id for layer in part.layers for stored in layer.objects if stored.kind == which)


@pytest.mark.parametrize(("which", "how"), [("master", "gone"), ("state", "cut")])
def test_a_save_whose_parts_name_what_is_not_there_is_given_up(saves: Saves, which: str, how: str) -> None:
    """Nothing becomes visible; the same layers can be saved again, and then are whole."""
    save = saves.begun(0)
    save.write_all()
    path = saves.path(named(save.parts()[1], which))
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[:-1])

    with pytest.raises(GivenUp, match="step 1 is given up: object"):
        save.join()

    assert saves.store.runs() == []
    path.unlink(missing_ok=True)
    again = saves.begun(1)
    again.write_all()
    again.join()
    assert saves.store.verify(read_data=True).ok


def test_a_save_whose_objects_are_being_collected_is_given_up(saves: Saves) -> None:
    """A part of a session that was idle for too long no longer protects them: what lies aside may go any moment."""
    save = saves.begun(0)
    save.write_all()
    path = saves.path(named(save.parts()[1], "master"))
    aside = saves.store.path / "gc" / "aside"
    aside.mkdir(exist_ok=True)
    path.rename(aside / path.name)

    with pytest.raises(GivenUp, match="which rank 1 had written, is gone"):
        save.join()
    assert saves.store.runs() == []


def test_a_part_that_names_what_vanished_is_replaced_by_a_failed_one(saves: Saves) -> None:
    """The rank that joins learns that the other one has failed, even though its part was visible."""
    first, second = saves.begun(0), saves.begun(1)
    first.write_all()
    reused = saves.path(named(first.parts()[1], "master"))

    def lose(operation: str, path: Path) -> None:
        if operation == "link" and "/parts/" in str(path):
            reused.unlink(missing_ok=True)

    second.write(0)
    saves.hook = lose
    with pytest.raises(Conflict, match="of the share of rank 1 were removed while it was written") as raised:
        second.write(1)
    saves.hook = None
    fail_share(saves.store.repo, second.works[1], str(raised.value))

    with pytest.raises(GivenUp, match=r"rank 1 could not write its share: objects of .* were removed"):
        second.parts()
