"""
A migration on a disk that refuses, and beside writers that do not know of it.

What a kill does to it is in test_crash.py, with the other verbs.
"""

from __future__ import annotations

import contextlib
import errno as errnos
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from layerstore import Keep
from layerstore.errors import Conflict, IntegrityError, StorageIO, Unsupported
from layerstore.migrations import runner
from layerstore.migrations.runner import Migrated, migrate
from layerstore.history.needs import Needs
from layerstore.storage.files import Files
from layerstore.storage.handles import no_hook
from layerstore.store import Store, init
from tests.compat.format0 import as_format_0
from tests.compat.steps import m0001_folders
from tests.faults.harness import (
    Call,
    Failure,
    Gate,
    Recorder,
    Refuser,
    attempt,
    composed,
    copied,
    descriptors,
    in_child,
    problems,
    refuse_links,
    seeded,
    tiny_checkpoint,
    tmpfs,
    truth,
)
from tests.faults.older import migrate_from_0, unmigrated_problems
from tests.faults.test_errors import ANSWERS, EXIT_CODES

SAMPLE = 10
"""Steps of a verb at which something happens, in a usual run."""

Scene = tuple[Path, dict[str, str]]


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Scene:
    """Return a folder with a store, its twin of format 0 and a checkpoint, and what the store composes to."""
    folder = fast_module_path
    tiny_checkpoint(folder / "first", step=2)
    tiny_checkpoint(folder / "second", step=4)
    with init(folder / "store") as store:
        store.ingest(folder / "first", run="run", pin="kept")
        earlier = {"run@2": composed(store, "run@2", folder), "kept": composed(store, "kept", folder)}
    as_format_0(copied(folder / "store", folder / "old"))
    return folder, earlier


# -- a disk that refuses -------------------------------------------------------------------------------------------


def _refused(folder: Path, old: Path, call: Call, number: int, lasting: bool, earlier: dict[str, str]) -> list[str]:
    """Migrate while *call* fails; return all that is not as it should be, also after a second try."""
    store, before = folder / "store", descriptors()
    hook = Refuser(call, number, lasting=lasting)
    failure = attempt(lambda: migrate_from_0(store, hook))
    found = _complaints(store, hook, failure, number)
    found += [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    found += _problems(store, old, folder, earlier)
    migrate_from_0(store, no_hook)
    return found + (unmigrated_problems(store, old, is_done=True) or problems(store, folder, earlier))


def _complaints(store: Path, hook: Refuser, failure: Failure | None, number: int) -> list[str]:
    if failure is None:
        return ["success was reported"]
    if failure.kind != "StorageIO" or failure.exit_code != EXIT_CODES[number]:
        return [failure.trace]
    if hook.failed[0] == store / "store.json":
        return []  # who knows whether that was exchanged: on a network filesystem the answer may have been lost
    is_old = unmigrated_problems(store, store, is_done=False) is not None
    return ["left behind: migrating"] if is_old and (store / "migrating").exists() else []


def _problems(store: Path, old: Path, folder: Path, earlier: dict[str, str]) -> list[str]:
    """Return what is wrong with a store that is of the old format, or of the new one, and nothing between."""
    found = unmigrated_problems(store, old, is_done=False)
    return problems(store, folder, earlier) if found is None else found


def _calls(old: Path, scratch: Path) -> list[Call]:
    recorder = Recorder()
    migrate_from_0(copied(old, scratch), recorder)
    return sorted(call for call in recorder.calls if call.operation in ANSWERS)


def _refuse_everywhere(scene: Scene, fast_path: Path, points: list[Call]) -> None:
    folder, earlier = scene

    cases = [(call, number, False) for call in points for number in ANSWERS[call.operation]]
    cases += [(call, errnos.ENOSPC, True) for call in points[::3]]
    print(f"{len(cases)} refusals at {len(points)} calls")
    for call, number, lasting in cases:
        place = fast_path / f"{call}-{number}-{lasting}"
        place.mkdir()
        copied(folder / "old", place / "store")
        found = _refused(place, folder / "old", call, number, lasting, earlier)
        assert found == [], f"{call} fails with {errnos.errorcode[number]}{' for good' * lasting}"
        shutil.rmtree(place)


def test_an_error_at_any_step_is_reported_and_harmless(scene: Scene, fast_path: Path) -> None:
    """One call of the sample fails: the store is of the old format or the new one, whole, and a repeat succeeds."""
    calls = _calls(scene[0] / "old", fast_path / "dry")

    _refuse_everywhere(scene, fast_path, sorted(seeded("migrate").sample(calls, SAMPLE)))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_an_error_at_every_step_is_reported_and_harmless(scene: Scene, fast_path: Path) -> None:
    """The same for every single call."""
    _refuse_everywhere(scene, fast_path, _calls(scene[0] / "old", fast_path / "dry"))


@pytest.mark.fault(14, 30)
def test_without_hard_links_an_error_is_harmless_too(
    scene: Scene, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``store.json`` keeps its name while its backup is made: whatever fails behind that, there still is a store."""
    monkeypatch.setattr(os, "link", refuse_links)
    recorder = Recorder()
    migrate_from_0(copied(scene[0] / "old", fast_path / "dry"), recorder)
    (behind,) = (call for call, path in recorder.paths if call.operation == "create" and path.name == "journal.new")
    others = [call for call in _calls(scene[0] / "old", fast_path / "dry-again") if call != behind]

    _refuse_everywhere(scene, fast_path, [behind, *sorted(seeded("no links").sample(others, 3))])


def _full(old: Path, small: Path, free_bytes: int, earlier: dict[str, str], scratch: Path) -> list[str]:
    """Let the store run out of space, then give it some; that there is too little is not noticed beforehand."""
    vars(runner)["check_space"] = lambda layout, files, volume: None
    store = copied(old, small / "store")
    room = os.statvfs(small)
    with (small / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, max(1, room.f_bavail * room.f_frsize - free_bytes))
    failure = attempt(lambda: migrate_from_0(store, no_hook))
    found = [] if failure is None or failure.exit_code == 23 else [failure.trace]
    found += [f"{free_bytes} bytes were enough"] if failure is None and free_bytes < 20_000 else []
    (small / "ballast").unlink()  # the index of a store that came through wants space too
    found += _problems(store, old, scratch, earlier)
    migrate_from_0(store, no_hook)
    return found + problems(store, scratch, earlier)


@pytest.mark.fault(16)
@pytest.mark.parametrize("free_bytes", [0, 8192, 20_480, 28_672, 131_072])
def test_a_full_disk_is_an_error_and_no_damage(scene: Scene, fast_path: Path, free_bytes: int) -> None:
    """On a real small filesystem, wherever space runs out: exit code 23 or success, and success once there is space."""
    folder, earlier = scene
    with tmpfs(fast_path / "small", 2 * 2**20) as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small tmpfs is not allowed here")
        scratch = fast_path / "scratch"
        scratch.mkdir()
        outcome = in_child(_full, folder / "old", fast_path / "small", free_bytes, earlier, scratch)

    assert outcome.needed() == []


# -- writers of the older format -----------------------------------------------------------------------------------


class _MigrateAt:
    """A hook that migrates the store in front of the n-th change of the disk, from another node as it were."""

    def __init__(self, store: Path, count: int) -> None:
        self._store = store
        self._left = count
        self.done: Migrated | None = None

    def __call__(self, operation: str, path: Path) -> None:
        """Count one change."""
        self._left -= 1
        if self._left == 0:
            self.done = migrate(self._store, steps=(m0001_folders.STEP,))


Work = Callable[[Store, Path], object]
WRITERS: dict[str, tuple[Work, str]] = {
    "ingest": (lambda store, folder: store.ingest(folder / "second", run="run"), "records-2/run/4.*"),
    "pin": (lambda store, folder: store.pin("late", "run@2"), "names-2/late"),
}


def _changes(folder: Path, store: Path, verb: str) -> tuple[int, int]:
    """Return how many changes the writer makes, and which of them publishes."""
    recorder = Recorder()
    with Store(copied(folder / "store", store), hook=recorder) as opened:
        WRITERS[verb][0](opened, folder)
    publishing = {"ingest": "commits", "pin": "pins"}[verb]
    moves = [
        operation.operation in {"link", "rename"} and publishing in path.parts for operation, path in recorder.paths
    ]
    return len(moves), moves.index(True) + 1


def _meanwhile(folder: Path, store: Path, verb: str, count: int) -> tuple[bool, bool]:
    """Write while the store is migrated in front of change *count*; return what was told, and what came of it."""
    work, pattern = WRITERS[verb]
    hook = _MigrateAt(copied(folder / "store", store), count)
    was_told = True
    with Store(store, hook=hook) as opened:
        try:
            work(opened, folder)
        except (Unsupported, StorageIO, IntegrityError):
            was_told = False
    assert hook.done is not None
    assert not any((store / name).exists() for name in m0001_folders.STEP.leaves)
    came = [*store.glob(pattern)] != []
    shutil.rmtree(store)
    return was_told, came


def _write_meanwhile(scene: Scene, fast_path: Path, verb: str, sample: int | None) -> None:
    folder = scene[0]
    total, publishing = _changes(folder, fast_path / "dry", verb)
    # All that matters happens around the one that publishes.
    certain = range(max(1, publishing - 4), min(total, publishing + 4) + 1)
    others = [count for count in range(1, total + 1) if count not in certain]
    chosen = others if sample is None else seeded(verb).sample(others, min(sample, len(others)))
    outcomes = {count: _meanwhile(folder, fast_path / f"{count}", verb, count) for count in sorted([*chosen, *certain])}
    print(f"{verb}: {len(outcomes)} of {total} changes; {[*outcomes.values()].count((False, True))} refused and there")

    assert [count for count, (was_told, came) in outcomes.items() if was_told and not came] == []
    assert {(False, False), (False, True)} <= set(outcomes.values())


@pytest.fixture
def _two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the locks away, as they are between two nodes: the order in which both look has to do."""
    monkeypatch.setattr("layerstore.migrations.runner._locked", lambda layout, files: contextlib.nullcontext())


@pytest.mark.usefixtures("_two_nodes")
@pytest.mark.parametrize("verb", WRITERS)
def test_what_is_reported_as_saved_during_a_migration_has_come_along(scene: Scene, fast_path: Path, verb: str) -> None:
    """A migration in front of a change that a writer makes: what the writer reports is in the new store."""
    _write_meanwhile(scene, fast_path, verb, 8)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_two_nodes")
@pytest.mark.parametrize("verb", WRITERS)
def test_a_migration_in_front_of_every_change_loses_nothing_that_was_reported(
    scene: Scene, fast_path: Path, verb: str
) -> None:
    """The same for every single change."""
    _write_meanwhile(scene, fast_path, verb, None)


@pytest.mark.usefixtures("_two_nodes")
def test_a_writer_that_was_refused_has_not_touched_the_new_store(scene: Scene, fast_path: Path) -> None:
    """Whoever opened the store before, and writes after, changes no file of its truth."""
    store = copied(scene[0] / "store", fast_path / "store")
    with Store(store) as opened:
        migrate(store, steps=(m0001_folders.STEP,))
        before = truth(store)
        for work, _ in WRITERS.values():
            with pytest.raises(Unsupported):
                work(opened, scene[0])

    assert truth(store) == before


# -- a collection of the older format ------------------------------------------------------------------------------


def _needed(store: Path) -> dict[str, set[str]]:
    """Return for every record of a store, by the name of its file, the ids of all that it needs."""
    with Store(store) as opened:
        rooms = opened.rooms
        names = rooms.records.names("run")
        return {
            name.file_name: {ref.id for ref in Needs(rooms).add_record(rooms.records.read(name).record)}
            for name in names
        }


def _collects(store: Path, gate: Gate, errors: list[BaseException]) -> None:
    """Collect as one who has the store open since long ago."""
    try:
        with Store(store, hook=gate) as opened:
            opened.gc(Keep(last=1), grace_seconds=0)
    except (Unsupported, StorageIO, IntegrityError, Conflict):
        pass  # told so
    except BaseException as error:  # noqa: BLE001  # the caller judges it
        errors.append(error)
    finally:
        gate.reached.set()


def _migrates(store: Path, gate: Gate, errors: list[BaseException]) -> None:
    try:
        migrate(store, Files(gate), steps=(m0001_folders.STEP,))
    except BaseException as error:  # noqa: BLE001  # the caller judges it
        errors.append(error)
    finally:
        gate.reached.set()


def _meet(store: Path, needed: dict[str, set[str]], *, collected: int, migrated: int, first: str) -> list[str]:
    """Let one of the two come to its step, then the other to its own; the first goes on to its end, then the other."""
    errors: list[BaseException] = []
    gates = {"gc": Gate(collected), "migrate": Gate(migrated)}
    deeds = {"gc": _collects, "migrate": _migrates}
    order = ["gc", "migrate"] if first == "gc" else ["migrate", "gc"]
    threads = [threading.Thread(target=deeds[name], args=(store, gates[name], errors)) for name in order]
    for name, thread in zip(order, threads, strict=True):
        thread.start()
        assert gates[name].reached.wait(60)
    for name, thread in zip(order, threads, strict=True):
        gates[name].may_go.set()
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        return [repr(error) for error in errors]
    found = {path.name for path in (store / "objects").rglob("*")} | {path.name for path in store.glob("gc/*/aside/*")}
    records = {path.name for path in (store / "records-2" / "run").iterdir()}
    newest = max(needed, key=lambda name: int(name.split(".")[0]))
    lost = [f"{name} lacks objects" for name in records & needed.keys() if not needed[name] <= found]
    return lost + ([] if newest in records else ["the newest is gone"])


def _collect_meanwhile(scene: Scene, fast_path: Path, sample: int | None) -> None:
    folder = scene[0]
    copied(folder / "store", fast_path / "before")
    with Store(fast_path / "before") as store:
        store.ingest(folder / "second", run="run")
        store.delete_pin("kept")
    needed = _needed(fast_path / "before")
    counts = []
    for deed in (_collects, _migrates):
        gate = Gate()
        deed(copied(fast_path / "before", fast_path / "store"), gate, [])
        counts.append(gate.calls_made)
    every = [
        (collected, migrated, first)
        for collected in range(counts[0])
        for migrated in range(counts[1])
        for first in ("gc", "migrate")
    ]
    chosen = every if sample is None else seeded("collected").sample(every, sample)
    wrong = []
    for collected, migrated, first in chosen:
        store_path = copied(fast_path / "before", fast_path / "store")
        for each in _meet(store_path, needed, collected=collected, migrated=migrated, first=first):
            wrong.append(f"collection at {collected}, migration at {migrated}, first {first}: {each}")
    print(f"{len(chosen)} of {len(every)} meetings")
    assert wrong == []


@pytest.mark.fault(107)
@pytest.mark.usefixtures("_two_nodes")
def test_a_collection_that_lost_its_lock_takes_nothing_that_a_migration_brings_over(
    scene: Scene, fast_path: Path
) -> None:
    """Each stops anywhere and goes on when the other has done some or all: no migrated record lacks an object."""
    _collect_meanwhile(scene, fast_path, 25)


@pytest.mark.fault(107)
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("_two_nodes")
def test_a_collection_and_a_migration_may_meet_at_any_step(scene: Scene, fast_path: Path) -> None:
    """The same for every pair of steps."""
    _collect_meanwhile(scene, fast_path, None)
