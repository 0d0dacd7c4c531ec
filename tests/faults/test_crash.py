"""
kill -9 at every step that writes: what was saved stays, and the same command then succeeds.

A dry pass counts the calls of the seam, then the verb runs once per call in a child that kills itself there.
Every end state is looked at twice, with the index as the crash left it and without any.
LMDB's own writes do not pass the seam: strace covers those, and random kills of processes at once (`test_at_once`).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerstore.ingest import transfer
from tests.faults.harness import (
    Call,
    Recorder,
    in_child,
    refuse_links,
    seeded,
    traced,
)
from tests.faults.verbs import VERBS, WRITES, aftermath, fresh

EVERY_CALL = pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)], id="every call")


def with_one_worker() -> None:
    """Let the verbs of this process make their calls in one order: the nth of a kind is then always the same one."""
    vars(transfer)["WORKERS_MAX"] = 1


# -- at the seam ---------------------------------------------------------------------------------------------------


def _crash(folder: Path, name: str, call: Call) -> None:
    with_one_worker()
    VERBS[name](folder, Recorder(call, lambda _: os.kill(os.getpid(), signal.SIGKILL)))


def _twin_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-without-index")


def _aftermaths(folder: Path, name: str) -> list[str]:
    """Look at the crash's end state as it is, and at a copy that has lost its index."""
    twin = _twin_of(folder)
    folder.mkdir(exist_ok=True)  # killed before anything was made
    shutil.copytree(folder, twin, symlinks=True)
    for store in ("store", "new"):
        shutil.rmtree(twin / store / "manifest", ignore_errors=True)
    found = aftermath(folder, name)
    return found + [f"without the index: {problem}" for problem in aftermath(twin, name)]


def _dry_pass(folder: Path, name: str) -> list[Call]:
    with_one_worker()
    recorder = Recorder()
    VERBS[name](folder, recorder)
    return recorder.calls


def _sample(calls: list[Call], chance: random.Random) -> list[Call]:
    """Return one of the first and last calls of an operation, and one of the others."""
    last = {call.operation: call for call in sorted(calls)}
    ends = {call for call in calls if call.ordinal == 1} | set(last.values())
    both = (sorted(ends), sorted(set(calls) - ends))
    points = [chance.choice(some) for some in both if some]
    return chance.sample(points, len(points))


def _as_it_is(work: Callable[..., object], *arguments: object) -> object:
    return work(*arguments)


def _without_links(work: Callable[..., object], *arguments: object) -> object:
    vars(os)["link"] = refuse_links
    return work(*arguments)


def _crash_at(
    count: int | None, scene: Path, path: Path, name: str, *, around: Callable[..., object] = _as_it_is
) -> None:
    """Kill the verb *name* at *count* of its calls, or at all of them."""
    calls = in_child(around, _dry_pass, fresh(scene, path / "dry", name), name).needed()
    points = calls if count is None else _sample(calls, seeded(name))[:count]
    print(f"{name}: {len(points)} of {len(calls)} crash points")

    def crash(call: Call) -> None:
        folder = fresh(scene, path / str(call), name)

        died = in_child(around, _crash, folder, name, call)
        looked = in_child(around, _aftermaths, folder, name)

        assert died.exit_code == -signal.SIGKILL, f"{call}: {died}"
        assert looked.needed() == [], f"{name} killed at {call}"
        for left in (folder, _twin_of(folder)):
            shutil.rmtree(left)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(crash, points))


@pytest.mark.fault(1, 2, 3, 4, 7, 11, 12, 13, 14, 44, 103)
@pytest.mark.known_fault("llmtailor 10")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.sample(4, by="name", always=("gc",))),
        pytest.param(2, marks=pytest.mark.full),
        EVERY_CALL,
    ],
)
def test_a_kill_at_any_step_loses_nothing(fast_path: Path, scene: Path, name: str, count: int | None) -> None:
    """After a kill at a step of the sample, everything earlier is whole and the verb succeeds."""
    _crash_at(count, scene, fast_path, name)


@pytest.mark.fault(4, 11, 12, 14, 30)
@pytest.mark.parametrize("name", ["ingest", "replace", "drop", "undrop", "gc", "repair", "migrate"])
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.full), EVERY_CALL])
def test_a_kill_without_hard_links_loses_nothing(fast_path: Path, scene: Path, name: str, count: int | None) -> None:
    """Where a file has one name only, what is moved is at one of its two places, and both are looked at."""
    _crash_at(count, scene, fast_path, name, around=_without_links)


# -- below the seam ------------------------------------------------------------------------------------------------

_DRIVER = """
import sys
from pathlib import Path
from layerstore.disk.open_files import no_hook
from tests.faults.verbs import VERBS
VERBS[sys.argv[1]](Path(sys.argv[2]), no_hook)
"""


# What LMDB does to its files, and what the catalog does to their folder; strace counts each call for itself.
_INDEX_CALLS = ("writev", "pwrite64", "fdatasync", "rename")


@pytest.mark.full
@pytest.mark.fault(5, 6, 99)
@pytest.mark.parametrize("name", ["ingest", "reindex"])
@pytest.mark.parametrize("call", _INDEX_CALLS)
@pytest.mark.usefixtures("strace")
@pytest.mark.sample(1, always=("rename-ingest",))
def test_a_kill_inside_the_index_loses_nothing(fast_path: Path, scene: Path, name: str, call: str) -> None:
    """LMDB's writes and syncs, and the swap of its folder, are survived like our own."""
    count, is_over = 0, False
    while not is_over:
        count += 1
        folder = fresh(scene, fast_path / f"index-{count}", name)
        manifest = folder / "store" / "manifest"
        watched = [option for path in (manifest, *manifest.iterdir()) for option in ("-P", str(path))]

        options = [*watched, "-e", f"inject={call}:signal=KILL:when={count}"]
        died = traced(options, _DRIVER, name, folder)
        is_over = died.returncode == 0
        looked = in_child(_aftermaths, folder, name)

        assert is_over or died.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), died.stderr
        assert looked.needed() == [], count
    print(f"{name}: {count - 1} kills at {call}")
    assert count > 1 or call == "rename"
