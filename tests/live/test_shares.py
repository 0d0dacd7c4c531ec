"""Parts whose objects vanish: of two ranks that hold what a checkpoint holds, in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import layerstore
from layerstore.disk import stream
from layerstore.errors import Conflict
from layerstore.history import NextCommit
from layerstore.limits import PAGE_BYTES
from layerstore.model import ObjectId
from layerstore.publish.rank_parts import GivenUp, fail_share, join, parts_of
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
            self.store, self._checkpoint, session="0" * 32, place=NextCommit.begun(None), step=1 + number, save=number
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


@pytest.mark.parametrize("when", ["before", "commits/"])
def test_a_save_whose_parts_are_gone_is_given_up(saves: Saves, when: str) -> None:
    """Nothing protects what they name any more: nothing becomes visible, and the same layers can be saved again."""
    save = saves.begun(0)
    save.write_all()
    parts = save.parts()

    def lose(operation: str = "link", path: Path = Path("before")) -> None:
        if operation == "link" and when in str(path):
            saves.hook = None
            (saves.store.path / "parts" / save.joint.session / "0.1").unlink()

    if when == "before":
        lose()
    saves.hook = lose
    with pytest.raises(GivenUp, match="gc removed the share of rank 1"):
        join(saves.store.repo, save.joint, parts, inherited={}, own=set())
    saves.hook = None

    assert saves.store.runs() == []
    again = saves.begun(1)
    again.write_all()
    again.join()
    assert saves.store.verify(read_data=True).ok


def test_a_draft_is_no_part(saves: Saves) -> None:
    """Until a rank has looked at what it names once more, nobody counts on that."""
    save = saves.begun(0)
    found: list[object] = []

    def look(operation: str, path: Path) -> None:
        if operation == "rename" and "/parts/" in str(path):
            found.append(parts_of(saves.store.repo, save.joint, {}))

    saves.hook = look
    save.write_all()

    assert found == [None, None]
    assert len(save.parts()) == 2


def test_a_part_that_names_what_vanished_is_replaced_by_a_failed_one(saves: Saves) -> None:
    """The rank that joins learns that the other one has failed, even though its part was visible."""
    first, second = saves.begun(0), saves.begun(1)
    first.write_all()
    reused = saves.path(first.parts()[1].layers[0].objects[0].id)

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


def test_a_share_that_is_there_stands(saves: Saves) -> None:
    """What fails after a rank has left its part withdraws nothing: the part may have been joined."""
    save = saves.begun(0)
    save.write_all()
    fail_share(saves.store.repo, save.works[1], "the scratch file could not be removed")

    save.join()
    assert saves.store.verify(read_data=True).ok
