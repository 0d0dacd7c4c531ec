"""
The kernel answers with an error, to any call of any verb: what strace injects, below the seam and below LMDB.

For each verb and each kind of call the calls are counted, then the verb runs once for each with that call failing.
What may come of it: success, with everything done, or the documented exit code; then success.
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

from tests.faults.harness import in_child, seeded, traced
from tests.faults.verbs import WRITES, fresh, litter, repeated, wrong

SAMPLE = 3
"""Refused calls in a usual run."""
EXIT_CODES = {errnos.EIO: 1, errnos.ENOSPC: 23, errnos.EDQUOT: 23, errnos.EFBIG: 23, errnos.ENOMEM: 1, errnos.EROFS: 12}
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
from layerstore.storage.handles import no_hook
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


def _refused(scene: Path, folder: Path, refusal: Refusal) -> None:
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
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(SAMPLE, marks=pytest.mark.sample(1, by="name")),
        pytest.param(None, marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)], id="every call"),
    ],
)
@pytest.mark.usefixtures("strace")
def test_a_refused_call_is_an_error_or_without_effect(
    scene: Path, fast_path: Path, name: str, count: int | None
) -> None:
    """Calls of the sample, with all that the system could answer to them."""
    asked = list(_ordinals(scene, fast_path / "dry", name))
    refusals = [Refusal(name, call, ordinal, number) for call, ordinal in asked for number in CALLS[call]]
    chosen = refusals if count is None else seeded("refused calls").sample(refusals, count)
    with ThreadPoolExecutor(2) as pool:
        folders = [fast_path / f"refused-{number}" for number in range(len(chosen))]
        list(pool.map(lambda case: _refused(scene, *case), zip(folders, chosen, strict=True)))
    print(f"{name}: {len(chosen)} calls refused")
