"""Limits of the process: memory, descriptors and file sizes, for each verb; nothing is lost, and nothing stays open."""

from __future__ import annotations

import errno as errnos
import resource
import warnings
from pathlib import Path

import pytest

from layerstore.errors import StorageIO
from layerstore.limits import MIB
from layerstore.storage import Files, OpenFile, no_hook
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
)
from tests.faults.verbs import VERBS, fresh, make_scene, wrong
from tests.generated import generate


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Path:
    """Return the scene that verbs begin at; it is copied, never changed."""
    return make_scene(fast_module_path / "scene", layout="hf")


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
    errno, code = {resource.RLIMIT_NOFILE: (errnos.EMFILE, 1), resource.RLIMIT_FSIZE: (errnos.EFBIG, 23)}[limit]
    found = []
    if failure is not None and (failure.errno, failure.exit_code) != (errno, code):
        # LMDB writes as much as it may, and then knows no more than that it was too little.
        is_of_index = failure.errno == errnos.EIO and "the index failed" in failure.message
        found += [] if is_of_index and limit == resource.RLIMIT_FSIZE else [failure.trace]
    found += [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    litter = leftovers(folder / "store")
    if limit != resource.RLIMIT_NOFILE:  # to remove a folder takes descriptors
        litter += [path.name for path in folder.glob("*.partial-*")]
    found += [f"left behind: {litter}"] if litter else []
    found += wrong(folder, name, is_done=failure is None)
    if failure is not None or name != "init":
        VERBS[name](folder, no_hook)
    return found + wrong(folder, name, is_done=True)


@pytest.mark.fault(25)
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.sample(2)
def test_any_verb_survives_too_few_descriptors(scene: Path, fast_path: Path, name: str) -> None:
    """EMFILE is told as what it is, and every descriptor that was opened is closed."""
    more = seeded(f"descriptors of {name}").choice([0, 1, 2, 3, 4, 5, 6, 8, 10, 14])
    args = (scene, fast_path / "scene", name, resource.RLIMIT_NOFILE, more)

    assert in_child(_limited, *args).needed() == [], more


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


@pytest.mark.fault(28)
@pytest.mark.parametrize("name", VERBS)
@pytest.mark.sample(2)
def test_any_verb_survives_a_limit_on_file_sizes(scene: Path, fast_path: Path, name: str) -> None:
    """EFBIG counts as a full disk."""
    size_bytes = seeded(f"sizes of {name}").choice([0, 100, 1000, 5000, 9000, 20_000, 40_000])
    args = (scene, fast_path / "scene", name, resource.RLIMIT_FSIZE, size_bytes)

    assert in_child(_limited, *args).needed() == [], size_bytes


@pytest.mark.fault(25, 28)
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", VERBS)
def test_any_verb_survives_any_limit(scene: Path, fast_path: Path, name: str) -> None:
    """Each number of descriptors up to enough, and file sizes of all kinds."""
    limits = [(resource.RLIMIT_NOFILE, more) for more in range(24)]
    sizes = (*range(0, 10_000, 500), *range(10_000, 300_000, 15_000))
    limits += [(resource.RLIMIT_FSIZE, size_bytes) for size_bytes in sizes]
    for number, (limit, value) in enumerate(limits):
        args = (scene, fast_path / f"scene-{number}", name, limit, value)
        assert in_child(_limited, *args).needed() == [], (limit, value)
    print(f"{name}: {len(limits)} limits")


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


@pytest.fixture(scope="module")
def large(fast_module_path: Path) -> Path:
    """Return a folder with an empty store, a small checkpoint and one with tensors of tens of megabytes."""
    folder = fast_module_path / "memory"
    generate(folder / "small", layers=1, hidden=16, vocab=16)
    generate(folder / "large", layers=1, hidden=512, vocab=20_000)
    return folder


@pytest.mark.full
@pytest.mark.fault(26)
def test_large_tensors_take_little_memory(large: Path, fast_path: Path) -> None:
    """A checkpoint of 150 MB is ingested, verified and composed within a few chunks and the stacks of threads."""
    folder = _memory_scene(large, fast_path)
    size_bytes = sum(path.stat().st_size for path in (large / "large").rglob("*") if path.is_file())
    assert size_bytes > 140 * MIB

    found, failure = in_child(_little_memory, folder, 120 * MIB).needed()

    assert failure is None, failure.trace
    assert found == []
    with Store(folder / "store") as store:
        assert composed(store, "large", fast_path) == fingerprint(folder / "out")


@pytest.mark.full
@pytest.mark.fault(26)
@pytest.mark.parametrize("more_bytes", [2 * MIB, 10 * MIB, 30 * MIB])
def test_without_memory_nothing_is_committed_and_nothing_left(large: Path, fast_path: Path, more_bytes: int) -> None:
    """Whoever runs out of it is told so: no half commit, no litter, and earlier commits are whole."""
    folder = _memory_scene(large, fast_path)

    found, failure = in_child(_little_memory, folder, more_bytes).needed()

    assert found == []
    assert failure is None or failure.kind in {"MemoryError", "StorageIO", "RuntimeError"}, failure.trace


def _memory_scene(large: Path, fast_path: Path) -> Path:
    folder = fast_path / "scene"
    folder.mkdir()
    init(folder / "store").close()
    for name in ("small", "large"):
        (folder / name).symlink_to(large / name)
    return folder
