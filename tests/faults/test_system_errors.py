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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.harness import in_child, leftovers, seeded, traced
from tests.faults.verbs import WRITES, fresh, make_scene, repeated, wrong

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


@pytest.fixture(scope="module")
def scene(fast_module_path: Path) -> Path:
    """Return the scene that verbs begin at; it is copied, never changed."""
    return make_scene(fast_module_path / "scene", layout="hf")


def _judged(folder: Path, refusal: Refusal, is_done: bool) -> list[str]:
    """Return what is wrong after a run, and after the verb was called again."""
    name = refusal.verb
    found = wrong(folder, name, is_done=is_done)
    litter = [*leftovers(folder / "store"), *(path.name for path in folder.glob("*.partial-*"))]
    if litter and refusal.call not in _CLEANS_UP:
        found.append(f"left behind: {litter}")
    return found + [f"afterwards: {problem}" for problem in repeated(folder, name)]


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


def _refusals(scene: Path, folder: Path, names: Iterable[str]) -> list[Refusal]:
    return [
        Refusal(name, call, ordinal, number)
        for name in names
        for call, ordinal in _ordinals(scene, folder / f"dry-{name}", name)
        for number in CALLS[call]
    ]


def _refused(scene: Path, folder: Path, refusal: Refusal) -> None:
    fresh(scene, folder, refusal.verb)
    inject = f"inject={refusal.call}:error={errnos.errorcode[refusal.number]}:when={refusal.ordinal}"

    done = traced(["-e", f"trace={refusal.call}", "-e", inject], _DRIVER, refusal.verb, folder)
    looked = in_child(_judged, folder, refusal, done.returncode == 0)

    assert "Traceback" not in done.stderr, f"{refusal}: {done.stderr}"
    assert done.returncode in (0, EXIT_CODES[refusal.number]), f"{refusal}: {done.stdout}"
    assert looked.needed() == [], f"{refusal}: {done.stdout}"
    shutil.rmtree(folder)


def _refuse_all(scene: Path, fast_path: Path, refusals: list[Refusal]) -> None:
    with ThreadPoolExecutor(2) as pool:
        folders = [fast_path / f"refused-{number}" for number in range(len(refusals))]
        list(pool.map(lambda case: _refused(scene, *case), zip(folders, refusals, strict=True)))
    print(f"{len(refusals)} calls refused")


@pytest.mark.full
@pytest.mark.fault(16, 17, 18, 22, 23, 28)
@pytest.mark.usefixtures("strace")
def test_a_refused_call_is_an_error_or_without_effect(scene: Path, fast_path: Path) -> None:
    """One call of a verb, chosen at random, a few times."""
    chance = seeded("refused calls")
    refusals = _refusals(scene, fast_path, chance.sample(WRITES, 1))
    _refuse_all(scene, fast_path, chance.sample(refusals, SAMPLE))


@pytest.mark.fault(16, 17, 18, 22, 23, 28, 99)
@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.usefixtures("strace")
def test_every_refused_call_is_an_error_or_without_effect(scene: Path, fast_path: Path, name: str) -> None:
    """Each call of each verb, with all that the system could answer to it."""
    _refuse_all(scene, fast_path, _refusals(scene, fast_path, [name]))
