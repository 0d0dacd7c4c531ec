"""
The disk refuses, at any step: a documented exit code, no litter, nothing lost, and the same command then succeeds.

At the seam every step fails once, with what the system could answer there, and also from there on for good.
Limits, full disks and what strace injects are tried on every verb in test_limits, test_disks and test_system_errors.
"""

from __future__ import annotations

import errno as errnos
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layerstore.storage import no_hook
from tests.faults.harness import Call, Failure, Recorder, Refuser, attempt, descriptors, in_child, seeded, snapshot
from tests.faults.verbs import VERBS, WRITES, fresh, litter, wrong

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


def _dry_pass(folder: Path, name: str) -> list[Call]:
    recorder = Recorder()
    VERBS[name](folder, recorder)
    return recorder.calls


def _refused(folder: Path, name: str, call: Call, number: int, lasting: bool) -> list[str]:
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
    found = litter(folder, "out.partial-*" if lasting else "out.*")
    if failure is None and not _may_fail_unseen(hook.failed, number):
        found.append(f"success was reported although {hook.failed} failed")
    elif failure is not None and (failure.kind != "StorageIO" or failure.exit_code != EXIT_CODES[number]):
        found.append(f"it failed otherwise: {failure.trace}")
    synced = [path for call, path in hook.paths if call.operation == "fsync" and path.is_file()]
    return found + (["a failed fsync was tried again"] if any(synced.count(path) > 1 for path in hook.failed) else [])


def _may_fail_unseen(failed: list[Path], number: int) -> bool:
    """Whether a collection has no need of it: it tells the time by its host's clock, or makes room and goes on."""
    return all(path.name == "tmp" or (path.parent.name == "aside" and number == errnos.ENOSPC) for path in failed)


@pytest.mark.fault(14, 16, 17, 23, 28)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.sample(2, by="name", always=("ingest",))),
        pytest.param(4, marks=pytest.mark.full),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)], id="every call"),
    ],
)
def test_an_error_at_any_step_is_reported_and_harmless(
    scene: Path, fast_path: Path, name: str, count: int | None
) -> None:
    """Calls of the sample fail: the code says why, nothing is left behind, and a repeat succeeds."""
    calls = sorted(in_child(_dry_pass, fresh(scene, fast_path / "dry", name), name).needed())
    asked = [call for call in calls if call.operation in ANSWERS]
    points = asked if count is None else sorted(seeded(name).sample(asked, min(len(asked), count)))
    cases = [(call, number, False) for call in points for number in ANSWERS[call.operation]]
    cases += [(call, errnos.ENOSPC, True) for call in points[::4]]
    print(f"{name}: {len(cases)} refusals at {len(points)} calls")

    def refuse(case: tuple[Call, int, bool]) -> None:
        call, number, lasting = case
        folder = fresh(scene, fast_path / f"{call}-{number}-{lasting}", name)
        outcome = in_child(_refused, folder, name, call, number, lasting)
        assert outcome.needed() == [], f"{name}: {call} fails with {errnos.errorcode[number]}{' for good' * lasting}"
        shutil.rmtree(folder)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(refuse, cases))
