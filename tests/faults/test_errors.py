"""
The disk refuses, at any step: a documented exit code, no litter, nothing lost, and the same command then succeeds.

At the seam every step fails once, with what the system could answer there, and also from there on for good. Below it,
and below LMDB, strace lets each call of the kernel fail once. Limits and full disks are tried on every verb in
test_limits and test_disks.
"""

from __future__ import annotations

import errno as errnos
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerstore.disk import no_hook
from tests.faults.harness import (
    Call,
    Failure,
    Recorder,
    Refuser,
    attempt,
    descriptors,
    in_child,
    seeded,
    snapshot,
    traced,
)
from tests.faults.verbs import VERBS, WRITES, fresh, litter, repeated, wrong

EXIT_CODES = {
    errnos.ENOSPC: 23,
    errnos.EDQUOT: 23,
    errnos.EFBIG: 23,
    errnos.EIO: 1,
    errnos.EMFILE: 1,
    errnos.ENOMEM: 1,
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
    if failure is None and not _may_fail_unseen(hook.failed, number) and not _were_given_up(hook):
        found.append(f"success was reported although {hook.failed} failed")
    elif failure is not None and (failure.kind != "StorageIO" or failure.exit_code != EXIT_CODES[number]):
        found.append(f"it failed otherwise: {failure.trace}")
    synced = [path for call, path in hook.paths if call.operation == "fsync" and path.is_file()]
    return found + (["a failed fsync was tried again"] if any(synced.count(path) > 1 for path in hook.failed) else [])


def _may_fail_unseen(failed: list[Path], number: int) -> bool:
    """Whether a collection has no need of it: it tells the time by its host's clock, or makes room and goes on."""
    return all(path.name == "tmp" or (path.parent.name == "aside" and number == errnos.ENOSPC) for path in failed)


def _were_given_up(hook: Refuser) -> bool:
    """Whether they were removed before anything was linked: a replace has found other content, and begins again."""
    until = next((at for at, (call, _) in enumerate(hook.paths) if call.operation == "link"), 0)
    return set(hook.failed) <= {path for call, path in hook.paths[:until] if call.operation == "unlink"}


@pytest.mark.fault(14, 16, 17, 23, 28)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.sample(2, by="name", always=("ingest",))),
        pytest.param(2, marks=pytest.mark.full),
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


# -- below the seam ------------------------------------------------------------------------------------------------

CALLS = {
    "pwrite64": (errnos.EIO, errnos.ENOSPC, errnos.EFBIG),
    "write": (errnos.ENOSPC,),
    "writev": (errnos.EIO, errnos.ENOSPC),
    "copy_file_range": (errnos.EIO, errnos.ENOSPC, errnos.ENOMEM),
    "fsync": (errnos.EIO, errnos.EDQUOT),
    "fdatasync": (errnos.EIO, errnos.ENOSPC),
    "linkat": (errnos.EDQUOT, errnos.EIO),
    "rename": (errnos.EIO, errnos.ENOSPC),
    "mkdir": (errnos.ENOSPC, errnos.EROFS),
    "utimensat": (errnos.EIO,),
    "preadv2": (errnos.EIO,),
    "pread64": (errnos.EIO, errnos.ENOMEM),
    "ftruncate": (errnos.EIO,),
    "unlink": (errnos.EIO,),
    "flock": (errnos.EIO,),
    "fallocate": (errnos.ENOSPC,),
}
"""What verbs ask of the system, with what it can answer other than success; opening files has limits of its own."""
_CALL = re.compile(r"(\d+) +([a-z0-9_]+)\(")
_CLEANS_UP = {"unlink"}
"""Where these fail something may be left behind, for a collection."""

_DRIVER = """
import os, sys, warnings
from pathlib import Path
from layerstore.errors import LayerstoreError
from layerstore.disk.open_files import no_hook
from tests.faults.verbs import VERBS
warnings.simplefilter("ignore")
os.close(os.open(sys.argv[2], os.O_RDONLY))  # the calls from here on are the verb's
try:
    VERBS[sys.argv[1]](Path(sys.argv[2]), no_hook)
except LayerstoreError as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(error.exit_code)
"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One call of one verb fails."""

    verb: str
    call: str
    ordinal: int
    number: int

    def __str__(self) -> str:
        return f"{self.verb}: {self.call} {self.ordinal} fails with {errnos.errorcode[self.number]}"


def _judged(folder: Path, refusal: Refusal, is_done: bool) -> list[str]:
    """Return what is wrong after a run, and after the verb was called again."""
    found = wrong(folder, refusal.verb, is_done=is_done)
    found += [] if refusal.call in _CLEANS_UP else litter(folder)
    return found + [f"afterwards: {problem}" for problem in repeated(folder, refusal.verb)]


def _ordinals(scene: Path, folder: Path, name: str) -> Iterator[tuple[str, int]]:
    """Yield each call of a verb with its number; strace counts for each thread, from the interpreter's start on."""
    log = folder.with_suffix(".log")
    options = ["-o", str(log), "-e", f"trace={','.join([*CALLS, 'openat'])}"]
    done = traced(options, _DRIVER, name, fresh(scene, folder, name))
    assert done.returncode == 0, done.stderr
    calls = [(match[1], match[2], line) for line in log.read_text().splitlines() if (match := _CALL.match(line))]
    begins = next(place for place, call in enumerate(calls) if f'"{folder}", O_RDONLY|O_CLOEXEC)' in call[2])
    before = Counter(call for _, call, _ in calls[:begins])
    in_all = Counter((thread, call) for thread, call, _ in calls)
    for call in sorted(CALLS):
        most = max((count for (_, which), count in in_all.items() if which == call), default=0)
        yield from ((call, ordinal) for ordinal in range(before[call] + 1, most + 1))
    shutil.rmtree(folder)


def _injected(scene: Path, folder: Path, refusal: Refusal) -> None:
    fresh(scene, folder, refusal.verb)
    inject = f"inject={refusal.call}:error={errnos.errorcode[refusal.number]}:when={refusal.ordinal}"

    done = traced(["-e", f"trace={refusal.call}", "-e", inject], _DRIVER, refusal.verb, folder)
    looked = in_child(_judged, folder, refusal, done.returncode == 0)

    assert "Traceback" not in done.stderr, f"{refusal}: {done.stderr}"
    assert done.returncode in (0, EXIT_CODES[refusal.number]), f"{refusal}: {done.stdout}"
    assert looked.needed() == [], f"{refusal}: {done.stdout}"
    shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.fault(16, 17, 18, 22, 23, 28, 99)
@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(3, marks=pytest.mark.sample(1, by="verb")),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)], id="every call"),
    ],
)
@pytest.mark.usefixtures("strace")
def test_a_refused_call_is_an_error_or_without_effect(
    scene: Path, fast_path: Path, verb: str, count: int | None
) -> None:
    """Calls of the sample, with all that the system could answer to them."""
    asked = list(_ordinals(scene, fast_path / "dry", verb))
    refusals = [Refusal(verb, call, ordinal, number) for call, ordinal in asked for number in CALLS[call]]
    chosen = refusals if count is None else seeded("refused calls").sample(refusals, count)
    with ThreadPoolExecutor(2) as pool:
        folders = [fast_path / f"refused-{number}" for number in range(len(chosen))]
        list(pool.map(lambda case: _injected(scene, *case), zip(folders, chosen, strict=True)))
    print(f"{verb}: {len(chosen)} calls refused")
