"""Parts whose objects vanish: of two ranks that hold what a checkpoint holds, in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import layerstore
from layerstore.errors import Conflict
from layerstore.live.capture import Captured
from layerstore.model import ObjectId, Part, PolicyUse, SourceLayout
from layerstore.ops.joining import GivenUp, Joint, join, parts_of
from layerstore.ops.place import place_begun
from layerstore.ops.shares import ShareWork, fail_share, write_share
from layerstore.store import Store
from tests.live.test_watch import captured, files_of, made

SESSION = "0" * 32
SMALL: dict[str, Any] = {"layers": 2, "hidden": 8, "vocab": 16, "layout": "raw"}


class Ranks:
    """Two ranks' shares of one save after another, and the store that they go to."""

    def __init__(self, folder: Path) -> None:
        """Make the store."""
        layerstore.init(folder / "store").close()
        self.hook: Callable[[str, Path], None] | None = None
        self.store = Store(folder / "store", hook=self._hook)
        self._held = [
            captured(files, rank) for rank, files in enumerate(files_of(made(folder / "checkpoint", 2, 1, **SMALL)))
        ]
        self.store.rooms.prepare_writing()
        self.store.rooms.parts.open_session(SESSION)

    def _hook(self, operation: str, path: Path) -> None:
        if self.hook is not None:
            self.hook(operation, path)

    def work(self, save: int, rank: int) -> ShareWork:
        """Return all that *rank* has, as its share of *save*."""
        share = self._held[rank].share
        due = frozenset(layer.layer for layer in share.layers)
        return ShareWork(session=SESSION, save=save, share=share, due=due, files=tuple, mark=self._held[rank].mark)

    def write(self, save: int, rank: int) -> None:
        """Write that."""
        write_share(self.store.rooms, self.work(save, rank), cast(Any, _Reader(self._held[rank])), frozen={})

    def joint(self, save: int) -> Joint:
        """Return what *save* is to become."""
        return Joint(
            work=self.work(save, 0),
            run="run",
            place=place_begun(None),
            step=1 + save,
            save_number=save,
            policy=PolicyUse(name="latest", parameters={}, decisions={}),
            layout=lambda: SourceLayout(flavour="raw", tag="global_step1", layer_pattern=None),
        )

    def parts(self, save: int) -> list[Part]:
        """Return both ranks' parts."""
        found = parts_of(self.store.rooms, self.joint(save), {})
        assert found is not None
        return found

    def path(self, object_id: ObjectId) -> Path:
        """Return where an object lies."""
        return self.store.rooms.layout.object(object_id)


class _Reader:
    """Gives what a rank holds."""

    def __init__(self, held: Captured) -> None:
        self._held = held

    def chunks(self, path: Path, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes there."""
        yield self._held.memory(path).bytes_of(path)[offset : offset + size_bytes].numpy().data


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Yield two ranks."""
    found = Ranks(tmp_path)
    yield found
    found.store.close()


def named(part: Part, which: str) -> ObjectId:
    """Return an object that *part* names."""
    if which == "state":
        assert part.state is not None
        return part.state.id
    return next(stored.id for layer in part.layers for stored in layer.objects if stored.kind == which)


@pytest.mark.parametrize("which", ["master", "optimizer", "state"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_save_whose_parts_name_what_is_not_there_is_given_up(ranks: Ranks, which: str, how: str) -> None:
    """Nothing becomes visible; the same layers can be saved again, and then are whole."""
    for rank in (0, 1):
        ranks.write(0, rank)
    parts = ranks.parts(0)
    path = ranks.path(named(parts[1], which))
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[:-1])

    with pytest.raises(GivenUp, match="step 1 is given up: object"):
        join(ranks.store.rooms, ranks.joint(0), parts, inherited={})

    assert ranks.store.runs == []
    path.unlink(missing_ok=True)
    for rank in (0, 1):
        ranks.write(1, rank)
    join(ranks.store.rooms, ranks.joint(1), ranks.parts(1), inherited={})
    assert ranks.store.verify(read_data=True).ok


def test_a_part_that_names_what_vanished_is_replaced_by_a_failed_one(ranks: Ranks) -> None:
    """Though it was visible already: whoever joins is told that its rank has failed."""
    for rank in (0, 1):
        ranks.write(0, rank)
    reused = ranks.path(named(ranks.parts(0)[1], "master"))

    def lose(operation: str, path: Path) -> None:
        if operation == "link" and "/parts/" in str(path):
            reused.unlink(missing_ok=True)

    ranks.write(1, 0)
    ranks.hook = lose
    with pytest.raises(Conflict, match="were removed while they were written") as raised:
        ranks.write(1, 1)
    ranks.hook = None
    fail_share(ranks.store.rooms, ranks.work(1, 1), str(raised.value))

    with pytest.raises(GivenUp, match="rank 1 could not write its share: 1 objects were removed"):
        parts_of(ranks.store.rooms, ranks.joint(1), {})
