"""A first level in each node: ranks write to their own, and commits are made in the level behind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import layerstore
from tests.forked import Nursery
from tests.live.launched import losses, one
from tests.live.test_levels import ids_in, steps_in
from tests.live.tiny import RUN, STEPS

PROGRAMS = "tests.live.on_levels"


def options_in(folder: Path, behind: str, **more: object) -> dict[str, Any]:
    """Return the options of a program whose ranks have a level each in *folder*, and one behind."""
    return {"levels": [str(folder / "near"), behind], "cache": str(folder / "cache"), "saver": {}, **more}


def behind_in(folder: Path, kind: str) -> str:
    """Return the level behind: a folder, or a bucket that is one."""
    return str(folder / "shared") if kind == "folder" else f"file://{folder}/bucket"


def size_of(folder: Path) -> int:
    """Return the size of all files below *folder*."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def launch(ranks: Nursery, program: str, options: dict[str, Any], folder: Path, name: str, *, count: int = 2) -> Any:
    """Run *program* to its end; return the launch."""
    with ranks.launch(f"{PROGRAMS}:{program}", options, folder=folder, name=name, count=count) as launched:
        if options.get("dies"):
            launched.until("killed", count=2)
            launched.statuses()
        else:
            launched.done()
    return launched


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_each_rank_sends_its_own(kind: str, ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Commits behind are those of a single store; whatever is lost of the nodes, the next job goes on."""
    saver = {"policy": "parity", "precision": "delta8", "exact_every": 3}
    first = tmp_path / "first"
    first.mkdir()
    options = options_in(first, behind_in(first, kind), until=4, saver=saver)
    begun = launch(ranks, "on_nodes", options, tmp_path, "begun")
    assert one(begun, "status")["collection_error"] == ""
    assert one(begun, "status")["pushed_step"] == 4
    assert steps_in(options["levels"][1]) == [4, 3, 2, 1]
    assert not list((first / "shared" / "parts").rglob("*.*"))
    alone = options_in(tmp_path, str(tmp_path / "unused"), until=4, saver=saver) | {"levels": [str(tmp_path / "alone")]}
    launch(ranks, "alone", alone, tmp_path, "alone")
    assert ids_in(options["levels"][1]) == ids_in(str(tmp_path / "alone"))

    for lost in ((), (1,), (0, 1)):
        folder = tmp_path / f"lost{len(lost)}"
        shutil.copytree(first, folder, symlinks=True)
        for node in lost:
            shutil.rmtree(folder / f"near{node}")
        options = options_in(folder, behind_in(folder, kind))
        again = launch(ranks, "requeued_on_nodes", options, tmp_path, folder.name)
        assert one(again, "resumed")["step"] == 4
        assert steps_in(options["levels"][1]) == [*range(STEPS, 0, -1)]


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_what_was_not_sent_is_sent_by_the_next_job(
    kind: str, ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]
) -> None:
    """The processes die before anything left their nodes; a node that is lost then costs only that."""
    first = tmp_path / "first"
    first.mkdir()
    launch(ranks, "on_nodes", options_in(first, behind_in(first, kind), until=2), tmp_path, "sent")
    options = options_in(first, behind_in(first, kind), dies=True)
    unsent = launch(ranks, "more_on_nodes", options, tmp_path, "unsent")
    assert steps_in(options["levels"][1]) == [2, 1]

    for lost in ((), (1,), (0,)):
        folder = tmp_path / f"lost{len(lost)}{lost[:1]}"
        shutil.copytree(first, folder, symlinks=True)
        for node in lost:
            shutil.rmtree(folder / f"near{node}")
        options = options_in(folder, behind_in(folder, kind))
        again = launch(ranks, "requeued_on_nodes", options, tmp_path, folder.name)
        assert one(again, "resumed")["step"] == (2 if lost else 4)
        assert losses(again).items() <= undisturbed.items()
        assert steps_in(options["levels"][1]) == [*range(STEPS, 0, -1)]
    assert losses(unsent).items() <= undisturbed.items()

    folder = tmp_path / "alone"
    shutil.copytree(first, folder, symlinks=True)
    options = options_in(folder, behind_in(folder, kind))
    alone = launch(ranks, "requeued_on_nodes", options, tmp_path, "one", count=1)
    assert one(alone, "resumed")["step"] == 2


def test_nodes_are_trimmed(ranks: Nursery, tmp_path: Path) -> None:
    """With keep=, each node keeps what the rules say of what is behind; the last level keeps all."""
    options = options_in(tmp_path, behind_in(tmp_path, "folder"), until=4, keep=2)
    launch(ranks, "on_nodes", options, tmp_path, "begun")
    assert steps_in(options["levels"][1]) == [4, 3, 2, 1]
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name / "objects").rglob("*") if path.is_file())
        for name in ("near0", "near1", "shared")
    ]
    assert sizes[0] < sizes[2] * 2 / 3
    assert sizes[1] < sizes[2] * 2 / 3


def test_the_level_behind_may_be_away_for_a_while(ranks: Nursery, tmp_path: Path, undisturbed: dict[int, str]) -> None:
    """Training goes on, and saves wait in the nodes, not in memory: none is lost, and wait() says what is missing."""
    options = options_in(tmp_path, behind_in(tmp_path, "folder"))
    launched = launch(ranks, "interrupted_on_nodes", options, tmp_path, "interrupted")
    assert len(launched.events("late")) == 2
    assert losses(launched) == undisturbed
    assert steps_in(options["levels"][1]) == [*range(STEPS, 0, -1)]
    assert one(launched, "status")["failed"] == 0
    with layerstore.open(options["levels"][1]) as store:
        # Those of the saves that had to wait came with them; step 2's may have met the folder while it went away.
        assert {1, 3, 4, *range(5, STEPS + 1)} <= {timing.step for timing in store.timings(RUN)}


def test_whatever_lies_behind_is_found_and_pinned(ranks: Nursery, tmp_path: Path) -> None:
    """Of three levels, the last one alone may be left; a pin is made where commits are, and goes on from there."""
    bucket = f"file://{tmp_path}/bucket"
    options = options_in(tmp_path, str(tmp_path / "shared"), until=6, pin="best", saver={"durable": "remote"})
    options["levels"].append(bucket)
    launch(ranks, "on_nodes", options, tmp_path, "begun")
    assert steps_in(bucket)[0] == 6
    for level in options["levels"][1:]:
        with layerstore.open(level) as store:
            assert [pin.name for pin in store.pins()] == ["best"]

    for name in ("near0", "near1", "shared"):
        shutil.rmtree(tmp_path / name)
    again = launch(ranks, "requeued_on_nodes", options, tmp_path, "again")
    assert one(again, "resumed")["step"] == 6
    assert steps_in(str(tmp_path / "shared"))[0] == STEPS


def test_a_slow_node_keeps_nobody_from_trimming(ranks: Nursery, tmp_path: Path) -> None:
    """The first node has records whose other half is still on its way; it is trimmed once that is there."""
    options = options_in(tmp_path, str(tmp_path / "shared"), until=4, keep=1, slow=0.5)
    launched = launch(ranks, "on_nodes", options, tmp_path, "slow")
    assert one(launched, "status")["collection_error"] == ""
    with layerstore.open(tmp_path / "near0") as store:
        assert [entry.step for entry in store.log(RUN)] == [4]


def test_a_part_that_comes_last_is_not_missed(ranks: Nursery, tmp_path: Path) -> None:
    """The last rank's share arrives right after the first one has looked for it, while the saver is being closed."""
    options = options_in(tmp_path, str(tmp_path / "shared"), until=2, slow=0.5, looks_late=1.0)
    launch(ranks, "on_nodes", options, tmp_path, "late")
    assert steps_in(options["levels"][1]) == [2, 1]
