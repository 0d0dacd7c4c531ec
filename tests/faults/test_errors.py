"""
The disk refuses, at any step: a documented exit code, no litter, nothing lost, and the same command then succeeds.

At the seam every step fails once, with what the system could answer there, and also from there on for good.
Limits, full disks and what strace injects are tried on every verb in test_limits, test_disks and test_system_errors.
"""

from __future__ import annotations

import errno as errnos
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerstore.storage import no_hook
from layerstore.store import Store
from tests.faults.harness import (
    Call,
    Failure,
    Recorder,
    Refuser,
    attempt,
    become_nobody,
    copied,
    descriptors,
    in_child,
    leftovers,
    problems,
    seeded,
    snapshot,
)
from tests.faults.verbs import VERBS, WRITES, facts_of, fresh, make_scene, wrong

EXIT_CODES = {
    errnos.ENOSPC: 23,
    errnos.EDQUOT: 23,
    errnos.EIO: 1,
    errnos.EMFILE: 1,
    errnos.EACCES: 12,
    errnos.EROFS: 12,
}

# What the system can answer to each operation, other than success.
ANSWERS = {
    "mkdir": (errnos.ENOSPC, errnos.EROFS),
    "create": (errnos.ENOSPC, errnos.EMFILE, errnos.EACCES),
    "write": (errnos.ENOSPC, errnos.EIO),
    "copy": (errnos.ENOSPC, errnos.EIO),
    "truncate": (errnos.ENOSPC, errnos.EIO),
    "fsync": (errnos.EIO, errnos.ENOSPC),
    "link": (errnos.ENOSPC, errnos.EDQUOT),
    "rename": (errnos.ENOSPC, errnos.EIO),
    "touch": (errnos.EIO, errnos.EROFS),
}


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Path:
    """Return the scene that verbs begin at; it is copied, never changed."""
    return make_scene(fast_module_path / "scene", layout="hf")


# -- at the seam ---------------------------------------------------------------------------------------------------


def _dry_pass(folder: Path, name: str) -> list[Call]:
    recorder = Recorder()
    VERBS[name](folder, recorder)
    return recorder.calls


def refused(folder: Path, name: str, call: Call, number: int, lasting: bool) -> list[str]:
    """Run the verb *name* while *call* fails with *number*; return all that is not as it should be."""
    hook = Refuser(call, number, lasting=lasting)
    target = snapshot(folder / "out")
    before = descriptors()
    failure = attempt(lambda: VERBS[name](folder, hook))
    found = _complaints(folder, hook, failure, number, lasting=lasting)
    found += [f"{descriptors() - before} descriptors stay open"] if descriptors() != before else []
    if failure is not None and snapshot(folder / "out") != target:
        # Where no rename works any more, nothing can be moved back; what was there is whole beside its place.
        aside = [snapshot(path) for path in folder.glob("out.replaced-*")]
        found += [] if lasting and (not target or target in aside) else ["the target has changed"]
    found += wrong(folder, name, is_done=False)
    again = attempt(lambda: VERBS[name](folder, no_hook))
    if again is not None and not (again.kind == "AlreadyExists" and name == "init"):
        found.append(f"the verb does not succeed again: {again.trace}")
    return found + wrong(folder, name, is_done=True)


def _complaints(folder: Path, hook: Refuser, failure: Failure | None, number: int, *, lasting: bool) -> list[str]:
    found: list[str] = []
    if failure is None:
        # Only what is done to be helpful may fail unseen.
        found += (
            [] if _ends_all_the_same(hook.failed, number) else [f"success was reported although {hook.failed} failed"]
        )
    elif failure.kind != "StorageIO" or failure.exit_code != EXIT_CODES[number]:
        found.append(f"it failed otherwise: {failure.trace}")
    beside = folder.glob("out.partial-*" if lasting else "out.*")
    litter = [*leftovers(folder / "store"), *leftovers(folder / "new"), *(path.name for path in beside)]
    found += [f"left behind: {litter}"] if litter else []
    synced = [path for call, path in hook.paths if call.operation == "fsync" and path.is_file()]
    found += ["a failed fsync was tried again"] if any(synced.count(path) > 1 for path in hook.failed) else []
    return found


def _ends_all_the_same(failed: list[Path], number: int) -> bool:
    """Whether a collection has no need of it: it tells the time by its host's clock, or makes room and goes on."""
    return all(path.name == "tmp" or (path.parent.name == "aside" and number == errnos.ENOSPC) for path in failed)


def _refuse_everywhere(scene: Path, path: Path, name: str, points: list[Call]) -> None:
    def refuse(case: tuple[Call, int, bool]) -> None:
        call, number, lasting = case
        folder = fresh(scene, path / f"{call}-{number}-{lasting}", name)
        outcome = in_child(refused, folder, name, call, number, lasting)
        assert outcome.needed() == [], f"{name}: {call} fails with {errnos.errorcode[number]}{' for good' * lasting}"
        shutil.rmtree(folder)

    cases = [(call, number, False) for call in points for number in ANSWERS.get(call.operation, ())]
    cases += [(call, errnos.ENOSPC, True) for call in points[::4] if call.operation in ANSWERS]
    print(f"{name}: {len(cases)} refusals at {len(points)} calls")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refuse, cases))


def _refuse_some(scene: Path, path: Path, name: str, count: int | None) -> None:
    calls = sorted(in_child(_dry_pass, fresh(scene, path / "dry", name), name).needed())
    asked = [call for call in calls if call.operation in ANSWERS]
    chosen = asked if count is None else sorted(seeded(name).sample(asked, min(len(asked), count)))
    _refuse_everywhere(scene, path, name, chosen)


@pytest.mark.fault(16, 17, 23, 28)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.sample(2, always=("ingest",))
def test_an_error_at_any_step_is_reported_and_harmless(scene: Path, fast_path: Path, name: str) -> None:
    """One call of the sample fails: the code says why, nothing is left behind, and a repeat succeeds."""
    _refuse_some(scene, fast_path, name, 1)


@pytest.mark.full
@pytest.mark.fault(16, 17, 23, 28)
@pytest.mark.parametrize("name", WRITES)
def test_an_error_at_some_steps_is_reported_and_harmless(scene: Path, fast_path: Path, name: str) -> None:
    """The same for each verb."""
    _refuse_some(scene, fast_path, name, 4)


@pytest.mark.fault(16, 17, 23, 28)
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WRITES)
def test_an_error_at_every_step_is_reported_and_harmless(scene: Path, fast_path: Path, name: str) -> None:
    """The same for every single call."""
    _refuse_some(scene, fast_path, name, None)


# -- read-only -----------------------------------------------------------------------------------------------------


def _as_nobody(folder: Path, earlier: dict[str, str]) -> list[str]:
    # Once as root: nobody may not be allowed to import what is still missing.
    assert problems(copied(folder / "store", folder / "warm"), folder / "scratch", earlier) == []
    become_nobody()
    before = snapshot(folder / "store")
    found = problems(folder / "store", folder / "scratch", earlier)
    second = folder.parent / "sources" / "second"
    with Store(folder / "store") as store:
        found += [] if store.show("run@2").step == 2 and store.ls("run@2") else ["show or ls says something else"]
        writes: dict[str, Callable[[], object]] = {
            "ingest": lambda: store.ingest(second, run="run"),
            "another run": lambda: store.ingest(second, run="new"),
            "pin": lambda: store.pin("named", "run@2"),
            "drop": lambda: store.drop("run@2"),
            "gc": store.gc,
            "reindex": store.reindex,
        }
        for name, write in writes.items():
            failure = attempt(write)
            if failure is None or failure.exit_code != 12:
                found.append(f"{name}: {failure and failure.trace}")
    return found + (["the store has changed"] if snapshot(folder / "store") != before else [])


def _open_to_all(folder: Path) -> None:
    for path in [folder, *folder.parents][:-1]:
        if path.stat().st_uid == os.getuid() and path != Path("/dev/shm"):
            path.chmod(0o755)
    (folder / "scratch").mkdir(exist_ok=True)
    (folder / "scratch").chmod(0o777)


@pytest.mark.fault(27)
@pytest.mark.parametrize("has_index", [True, False])
def test_a_store_without_write_permission_can_be_read(scene: Path, fast_path: Path, has_index: bool) -> None:
    """Questions and composites work, everything that writes exits with 12, and nothing changes."""
    folder = fresh(scene, fast_path / "locked", "ingest")
    if not has_index:
        shutil.rmtree(folder / "store" / "manifest")
    for each in (folder, scene):
        _open_to_all(each)
    for path in [folder / "store", *(folder / "store").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    outcome = in_child(_as_nobody, folder, {"run@2": facts_of(folder)["first"]})

    assert outcome.needed() == []
    assert {notice.split(":")[0] for notice in outcome.notices} <= {"IndexNotice"}
