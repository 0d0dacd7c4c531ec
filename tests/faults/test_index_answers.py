"""
The index is removed, made anew or put back to an old state after any step of a history: the answers are the same.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore import Keep
from layerstore.errors import NotFound
from layerstore.storage import Files, open_repository
from layerstore.store import Store, init
from tests.faults.harness import composed, in_child, tiny_checkpoint
from tests.unit import samples

MANY = 10_000
REBUILD_SECONDS_MAX = 120.0


def answers(path: Path) -> str:
    """Return what the store at *path* says of everything."""
    with Store(path) as store:
        refs = [f"{entry.run}@{entry.step}" for entry in store.log()] + [pin.name for pin in store.pins()]
        return repr((store.runs, store.log(), [_plan(store, ref) for ref in refs], store.verify()))


def _plan(store: Store, ref: str) -> object:
    try:
        return store.show(ref), store.compose(ref).composition
    except NotFound as exc:  # of an earlier attempt
        return str(exc), exc.hint


def _history(folder: Path) -> list[str]:
    """Go through a history; return the steps after which an answer depends on the index."""
    path, old = folder / "store", folder / "old"
    init(path).close()
    for step in (2, 4, 6, 8):
        tiny_checkpoint(folder / f"step{step}", step=step)
    tiny_checkpoint(folder / "other", step=4, seed=1)
    deeds: dict[str, Callable[[Store], object]] = {
        "first": lambda store: store.ingest(folder / "step2", run="run"),
        "selective": lambda store: store.ingest(folder / "step4", run="run", policy="parity"),
        "pinned": lambda store: store.pin("kept", "run@4"),
        "replaced": lambda store: store.ingest(folder / "other", run="run", replace=True),
        "selective again": lambda store: store.ingest(folder / "step6", run="run", policy="parity"),
        "another run": lambda store: store.ingest(folder / "step6", run="other"),
        "dropped": lambda store: store.drop("run@2"),
        "gone back": lambda store: store.ingest(folder / "step4", run="run", rollback=True),
        "after that": lambda store: store.ingest(folder / "step8", run="run", policy="parity"),
        "collected": lambda store: store.gc(Keep(last=1), grace_seconds=0),
        "again": lambda store: store.ingest(folder / "step2", run="third"),
    }
    found = []
    for name, deed in deeds.items():
        time.sleep(0.02)
        with Store(path) as store:
            deed(store)
        expected = answers(path)
        for how in ("rolled back", "removed", "reindexed"):
            if how == "rolled back" and old.exists():
                shutil.rmtree(path / "manifest")
                shutil.copytree(old, path / "manifest")
            elif how == "removed":
                shutil.rmtree(path / "manifest")
            elif how == "reindexed":
                with Store(path) as store:
                    store.reindex()
            found += [f"{name}, {how}"] if answers(path) != expected else []
        if name in {"selective", "dropped", "after that"}:  # old for a while
            shutil.rmtree(old, ignore_errors=True)
            shutil.copytree(path / "manifest", old)
    with Store(path) as store:
        composed(store, "kept", folder)
    return found


@pytest.mark.fault(45, 92, 101)
def test_answers_do_not_depend_on_the_index(fast_path: Path) -> None:
    """After each step: without it, with a fresh one, and with one of some steps before."""
    outcome = in_child(_history, fast_path)

    assert outcome.needed() == []
    # An index from before a collection has rows of what that removed: it says so, and answers right.
    assert all("no longer there" in notice for notice in outcome.notices)


def _rebuilt(path: Path) -> tuple[float, bool]:
    layers = [samples.entry(f"model.layers.{number}") for number in range(32)]
    repo = samples.repo(path)
    for step in range(MANY):
        repo.records.link(samples.commit(samples.record(step=step, layers=layers)))
    with contextlib.closing(repo.catalog):
        first = repo.catalog.view("sft").visible
    shutil.rmtree(path / "manifest")
    again = open_repository(path, Files())
    started = time.perf_counter()
    with contextlib.closing(again.catalog):
        assert again.catalog.rebuild() == MANY
        return time.perf_counter() - started, again.catalog.view("sft").visible == first


@pytest.mark.fault(101)
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_a_long_index_is_rebuilt_in_bounded_time(fast_path: Path) -> None:
    """Ten thousand records of 32 layers: a minute or so, whatever else the machine does."""
    seconds, is_equal = in_child(_rebuilt, fast_path / "store", timeout_seconds=1000.0).needed()

    print(f"{MANY} records in {seconds:.1f} s")
    assert is_equal
    assert seconds < REBUILD_SECONDS_MAX
