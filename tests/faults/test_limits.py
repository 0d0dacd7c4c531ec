"""Limits of the process: memory, descriptors and file sizes, for each verb; nothing is lost, and nothing stays open."""

from __future__ import annotations

import errno as errnos
import resource
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import layerstore.coding.kernels  # noqa: F401  # before there is a limit: what is imported late needs descriptors, too
from layerstore.disk import Files, OpenFile, no_hook
from layerstore.errors import StorageIO
from layerstore.limits import MIB
from layerstore.store import Store, init
from tests.faults.harness import (
    Failure,
    attempt,
    composed,
    descriptors,
    fingerprint,
    in_child,
    leftovers,
    problems,
    seeded,
    snapshot,
    tiny_checkpoint,
)
from tests.faults.verbs import VERBS, fresh, litter, wrong
from tests.generated import generate

VALUES = {
    resource.RLIMIT_NOFILE: [*range(24)],
    resource.RLIMIT_FSIZE: [0, 100, *range(500, 10_000, 500), *range(10_000, 300_000, 15_000)],
}
"""How many descriptors more than are open, and how many bytes to a file."""
ENDS_IN = {resource.RLIMIT_NOFILE: (errnos.EMFILE, 1), resource.RLIMIT_FSIZE: (errnos.EFBIG, 23)}


def _limited(scene: Path, folder: Path, name: str, limit: int, value: int) -> list[str]:
    """Run a verb within a limit, and then without."""
    fresh(scene, folder, name)
    before = descriptors()
    hard = resource.getrlimit(limit)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the index may be out of reach, and says so
        resource.setrlimit(limit, (value + (before if limit == resource.RLIMIT_NOFILE else 0), hard))
        failure = attempt(lambda: VERBS[name](folder, no_hook))
        resource.setrlimit(limit, (hard, hard))
    found = []
    if failure is not None and (failure.errno, failure.exit_code) != ENDS_IN[limit]:
        # LMDB writes as much as it may, and then knows no more than that it was too little.
        is_of_index = failure.errno == errnos.EIO and "the index failed" in failure.message
        found += [] if is_of_index and limit == resource.RLIMIT_FSIZE else [failure.trace]
    found += [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    # To remove a folder takes descriptors.
    found += litter(folder, "no target" if limit == resource.RLIMIT_NOFILE else "*.partial-*")
    found += wrong(folder, name, is_done=failure is None)
    if failure is not None or name != "init":
        VERBS[name](folder, no_hook)
    return found + wrong(folder, name, is_done=True)


@pytest.mark.fault(25, 28)
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.parametrize("limit", VALUES, ids=["descriptors", "sizes"])
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.sample(2, by="name")),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)], id="all"),
    ],
)
def test_any_verb_survives_any_limit(scene: Path, fast_path: Path, name: str, limit: int, count: int | None) -> None:
    """EMFILE is told as what it is, EFBIG as a full disk, and every descriptor that was opened is closed."""
    values = VALUES[limit] if count is None else seeded(f"limits of {name}").sample(VALUES[limit], count)
    for value in values:
        args = (scene, fast_path / f"scene-{value}", name, limit, value)
        assert in_child(_limited, *args).needed() == [], value


@pytest.mark.fault(25)
def test_who_can_open_nothing_has_seen_no_damage(scene: Path, fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify ends with the system's own error: it knows nothing of the files that it could not open."""
    folder = fresh(scene, fast_path / "scene", "verify")
    opened = Files.open

    def refuse(self: Files, path: Path) -> OpenFile:
        if "objects" in path.parts:
            raise StorageIO(f"cannot open {path}: Too many open files", errno=errnos.EMFILE, filename=str(path))
        return opened(self, path)

    monkeypatch.setattr(Files, "open", refuse)
    with Store(folder / "store") as store, pytest.raises(StorageIO) as caught:
        store.verify()

    assert caught.value.errno == errnos.EMFILE


def _with_few_descriptors(path: Path, deed: Callable[[Store, Path], object], folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    with Store(path) as store:
        deed(store, folder)


def _ingests(store: Store, source: Path) -> object:
    return store.ingest(source, run="run")


def _composes(store: Store, out: Path) -> object:
    return store.compose("run@2").write(out)


@pytest.mark.full
@pytest.mark.fault(25)
@pytest.mark.known_fault("llmtailor 17")
def test_a_checkpoint_of_more_files_than_descriptors_goes_in_and_out(fast_path: Path) -> None:
    """Sources are closed once they are read, and files that wait for their fsync are bounded."""
    source, store, out = (fast_path / name for name in ("checkpoint-2", "store", "out"))
    tiny_checkpoint(source, layout="hf")
    for number in range(300):
        (source / f"extra_{number}.txt").write_text(f"{number}" * (number % 2 or 10_000))
    init(store).close()

    in_child(_with_few_descriptors, store, _ingests, source).needed()
    in_child(_with_few_descriptors, store, _composes, out).needed()

    expected, found = snapshot(source), snapshot(out)
    assert expected.keys() | {"layerstore.json"} == found.keys()
    extra = [name for name in expected if name.startswith("extra")]
    assert [expected[name] for name in extra] == [found[name] for name in extra]


# -- memory --------------------------------------------------------------------------------------------------------


def _little_memory(folder: Path, more_bytes: int) -> tuple[list[str], Failure | None]:
    """Ingest, verify and compose a checkpoint of 150 MB with so much memory."""
    with Store(folder / "store") as store:  # imports, and starts threads once
        store.ingest(folder / "small", run="small")
        store.verify(read_data=True)
        expected = composed(store, "small", folder / "scratch")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]

    def work() -> None:
        with Store(folder / "store") as store:
            store.ingest(folder / "large", run="large")
            assert store.verify(read_data=True).ok
            store.compose("large").write(folder / "out", durable=False)

    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    failure = attempt(work)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    found = [f"left behind: {leftovers(folder / 'store')}"] if leftovers(folder / "store") else []
    found += [f"left behind: {path.name}" for path in folder.glob("out.*")]
    return found + problems(folder / "store", folder / "scratch", {"small@2": expected}), failure


@pytest.mark.full
@pytest.mark.fault(26)
def test_large_tensors_take_little_memory_and_less_is_told(fast_path: Path) -> None:
    """A few chunks and the stacks of threads suffice; with less there is no half commit and no litter."""
    generate(fast_path / "small", layers=1, hidden=16, vocab=16)
    large = generate(fast_path / "large", layers=1, hidden=512, vocab=20_000)
    assert sum(path.stat().st_size for path in large.rglob("*") if path.is_file()) > 140 * MIB
    for more_mib in (2, 10, 30, 120):
        folder = fast_path / f"{more_mib}"
        folder.mkdir()
        init(folder / "store").close()
        for name in ("small", "large"):
            (folder / name).symlink_to(fast_path / name)

        found, failure = in_child(_little_memory, folder, more_mib * MIB).needed()

        assert found == []
        assert failure is None or failure.kind in {"MemoryError", "StorageIO", "RuntimeError"}, failure.trace
    assert failure is None, failure.trace
    with Store(folder / "store") as store:
        assert composed(store, "large", fast_path) == fingerprint(folder / "out")
