"""
Several at once: processes, threads and forks share a store and never mix what they write.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerstore.errors import Conflict, Internal, Locked
from layerstore.store import Store, init
from tests.faults.harness import (
    Failure,
    attempt,
    child,
    composed,
    copied,
    in_child,
    leftovers,
    problems,
    tiny_checkpoint,
)

ROUNDS = 3
"""How often processes meet in a usual run."""


@pytest.fixture(scope="module")
def sources(fast_module_path: Path) -> Path:
    """Return a folder with three checkpoints, and a store of each called ``store-NAME``."""
    for name, step, seed in (("step2", 2, 0), ("step4", 4, 0), ("other2", 2, 1)):
        tiny_checkpoint(fast_module_path / name, step=step, seed=seed, layout="hf")
        with init(fast_module_path / f"store-{name}") as store:
            store.ingest(fast_module_path / name, run="run")
    return fast_module_path


@pytest.fixture(scope="module")
def digests(sources: Path) -> dict[str, str]:
    """Return what the three checkpoints compose to."""
    found = {}
    for name in ("step2", "step4", "other2"):
        with Store(sources / f"store-{name}") as store:
            found[name] = composed(store, "run", sources)
    return found


def _ingest(path: Path, source: Path, run: str, deadline_seconds: str) -> Failure | None:
    os.environ["LAYERSTORE_LOCK_TIMEOUT"] = deadline_seconds
    with Store(path) as store:
        return attempt(lambda: store.ingest(source, run=run))


def _at_once(*calls: tuple[Path, Path, str, str]) -> list[Failure | None]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [outcome.needed() for outcome in pool.map(lambda call: in_child(_ingest, *call), calls)]


@pytest.mark.fault(47, 102, 105)
@pytest.mark.parametrize(
    ("calls", "deadline_seconds", "refusal", "refused_max"),
    [
        ([("step2", "run"), ("step4", "run")], "60", "", 0),
        ([("step2", "run"), ("step4", "run")], "0", Locked.__name__, 1),
        ([("step2", "run"), ("step2", "run"), ("step2", "twin")], "60", "", 0),
        pytest.param([("step2", "run"), ("other2", "run")], "60", Conflict.__name__, 1, marks=pytest.mark.full),
    ],
    ids=["two steps", "two steps that wait for nobody", "the same", "two contents"],
)
def test_two_ingests_at_once_both_succeed_or_one_is_refused(
    sources: Path,
    digests: dict[str, str],
    fast_path: Path,
    calls: list[tuple[str, str]],
    deadline_seconds: str,
    refusal: str,
    refused_max: int,
) -> None:
    """All get in, or the second is told who is busy or what is there; never something in between."""
    for number in range(ROUNDS):
        path = fast_path / f"store{number}"
        init(path).close()

        failures = _at_once(*((path, sources / name, run, deadline_seconds) for name, run in calls))

        kinds = [failure.kind for failure in failures if failure is not None]
        assert set(kinds) <= {refusal}, failures
        assert len(kinds) == refused_max if refusal == Conflict.__name__ else len(kinds) <= refused_max
        done = [call for call, failure in zip(calls, failures, strict=True) if failure is None]
        assert problems(path, fast_path, {f"{run}@{name[-1]}": digests[name] for name, run in done}) == []
        assert leftovers(path) == []
        with Store(path) as store:
            assert len(store.log()) == len(set(done))


def _ingest_slowly(path: Path, source: Path, runs: list[str]) -> None:
    with Store(path) as store:
        for run in runs:
            store.ingest(source, run=run)


def _read_all_the_time(path: Path, source: Path, digest: str, scratch: Path) -> list[str]:
    found = []
    with child(_ingest_slowly, path, source, [f"run{number}" for number in range(25)]) as writer:
        while writer.is_alive():
            with Store(path) as store:
                for entry in store.log():
                    if entry.damage is not None or composed(store, f"{entry.run}@{entry.step}", scratch) != digest:
                        found.append(f"{entry.run} was seen before it was whole")
        writer.join()
    return found


@pytest.mark.full
@pytest.mark.fault(48)
def test_readers_see_whole_commits_only(sources: Path, digests: dict[str, str], fast_path: Path) -> None:
    """Whatever a log shows while another process writes, composes at once; and the index does not grow with readers."""
    path = fast_path / "store"
    init(path).close()

    assert _read_all_the_time(path, sources / "step2", digests["step2"], fast_path) == []
    assert len([*(path / "commits").iterdir()]) == 25
    assert (path / "manifest" / "data.mdb").stat().st_size < 2**20


# -- forks ---------------------------------------------------------------------------------------------------------


def _forked(work: Callable[[], object]) -> Failure | None:
    """Call *work* in a plain fork of this process; return what it raised."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        sender.send(attempt(work))
        os._exit(0)
    sender.close()
    failure: Failure | None = receiver.recv()
    os.waitpid(pid, 0)
    return failure


def _use_after_fork(path: Path, source: Path) -> list[str]:
    found = []
    with Store(path) as store:
        store.log()
        for work in (store.log, lambda: store.compose("run@2"), lambda: store.ingest(source, run="run")):
            failure = _forked(work)
            if failure is None or failure.kind != Internal.__name__ or "opened in process" not in failure.message:
                found.append(f"{failure}")
        fresh = _forked(lambda: Store(path).log())
        found += [] if fresh is None else [fresh.trace]
        found += [] if [entry.step for entry in store.log()] == [2] else ["the parent is confused"]
        store.ingest(source, run="run")
        found += [] if store.verify(read_data=True).ok else ["the parent's store is damaged"]
    return found


@pytest.mark.fault(52)
def test_a_store_does_not_survive_a_fork(sources: Path, fast_path: Path) -> None:
    """The child is told so, its parent does not notice, and a store opened afresh in the child works."""
    path = copied(sources / "store-step2", fast_path / "store")

    assert in_child(_use_after_fork, path, sources / "step4").needed() == []


# -- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.fault(53)
def test_threads_and_stores_of_one_process_share_an_index(
    sources: Path, digests: dict[str, str], fast_path: Path
) -> None:
    """LMDB forbids opening a file twice; ingests, questions and composites go on while other stores are closed."""
    path = fast_path / "store"

    def work(number: int) -> None:
        run, step = f"run{number % 4}", 2 if number % 2 else 4
        with Store(path) as mine:
            mine.ingest(sources / f"step{step}", run=run)
            mine.log()
        assert composed(store, f"{run}@{step}", fast_path / f"scratch{number}") == digests[f"step{step}"]

    with init(path) as store:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(16)))
        assert store.verify(read_data=True).ok
        assert len(store.log()) == 4


@pytest.mark.fault(53)
def test_threads_survive_a_damaged_index(sources: Path, fast_path: Path) -> None:
    """One of them replaces it, all get their answers."""
    path = copied(sources / "store-step2", fast_path / "store")
    (path / "manifest" / "data.mdb").write_bytes(os.urandom(20_000))
    assert in_child(_ask_from_threads, path).needed() == [2] * 24


def _ask_from_threads(path: Path) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Store(path) as store, ThreadPoolExecutor(6) as pool:
            return list(pool.map(lambda _: store.log()[0].step, range(24)))
