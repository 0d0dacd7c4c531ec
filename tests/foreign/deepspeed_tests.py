"""
DeepSpeed's own tests of checkpoints under ZeRO, run three ways.

    git clone --branch v0.19.8 https://github.com/deepspeedai/DeepSpeed
    pip install --target old-pytest 'pytest<8.4'
    PYTHONPATH=old-pytest python -m tests.foreign.deepspeed_tests DeepSpeed

They are DeepSpeed's and no part of this repository; take those of the version that is installed.
Their fixtures need a pytest before 8.4. The ranks are processes on this machine's processors.

plain: DeepSpeed alone. drop-in: a saver is attached to every engine, so the checkpoints hold pointers and are loaded
from a store. round-trip: every checkpoint is ingested into a store and replaced by what the store composes.
Whatever passes plain has to pass the other ways, with as many saves, but for what `LIMITS` names.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.environment import REPOSITORY, memory
from tests.foreign.plugin import FOLDER, OUTCOMES, STAGES
from tests.operators import claim
from tests.ranks.launch import cpu_environment

WAYS = ("plain", "drop-in", "round-trip")

UNIVERSAL = "universal checkpoints are made from shards, which compose writes, and not from pointers"

ACCUMULATING = "a saver refuses to save while gradients are being accumulated, since they would be lost"

READS_ITSELF = "the test reads the shards itself, and finds pointers"

REFUSED = "elastic_checkpoint is refused"

OTHER_RANKS = "the test wants a load on another number of ranks to fail, and with a saver it does not"

_CLASS = "test_zero_optimizer.py::TestZeROElasticCheckpoint"

_ELASTIC = [
    (f"{_CLASS}::test_elastic_checkpoint_{ranks}_dp[{part}-{load}-{save}]", load, save)
    for ranks, part, load, save in product(("fixed", "change"), (True, False), (True, False), (True, False))
]
"""The tests, and whether the engine that loads and the one that saves is elastic."""

LIMITS = {
    "drop-in": {
        "test_universal_checkpoint.py": UNIVERSAL,
        "test_shared_weights.py": READS_ITSELF,
        "test_zero_optimizer.py::TestZeROSaveLoadEdgeCase::test_save_before_accum_grad_is_done": ACCUMULATING,
        "test_zero_optimizer.py::TestZeROCheckpoint::test_hybrid_optimizer_state": ACCUMULATING,
        "test_zero_optimizer.py::TestZeROCheckpointFrozenWeights::test_save_exclude": READS_ITSELF,
        f"{_CLASS}::test_elastic_checkpoint_change_dp[True-False-False]": OTHER_RANKS,
        **{test: REFUSED for test, load, save in _ELASTIC if load or save},
    },
    "round-trip": {test: REFUSED for test, _, save in _ELASTIC if save},
}
"""What is not run a way, by how its name begins, and why. A rank that fails alone would hold up the others."""

RANKS_MAX = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a test."""

    outcome: str
    """``passed``, ``failed``, ``skipped`` or ``hung``."""
    stage: int
    """Of ZeRO."""
    saves: int
    """How many checkpoints were saved under ZeRO."""
    reason: str
    """The traceback, or why it was skipped."""

    def __str__(self) -> str:
        return f"{self.outcome}, {self.saves} saved" if self.outcome == "passed" else self.outcome


LIMIT = Outcome("limit", 0, 0, "")

NOT_RUN = Outcome("not run", 0, 0, "an earlier test hung, or pytest ended")


def run(checkout: Path, folder: Path, stages: Sequence[int], tests: Sequence[str]) -> dict[str, Outcome]:
    """Run those of *tests* that are of *stages* the way that *folder* is called; return what came of each."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", *tests, "-p", "tests.foreign.plugin"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--basetemp={folder / 'pytest'}"]
    command += [f"--deselect=unit/checkpoint/{name}" for name in LIMITS.get(folder.name, ())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=checkout / "tests",
            env=environment(folder) | {STAGES: " ".join(map(str, stages))},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait()  # the plugin ends what hangs
        finally:
            with suppress(ProcessLookupError):  # ranks that hang outlive their pytest
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcomes(folder)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a pytest and its ranks."""
    given = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **cpu_environment(),
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *given]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "DS_TEST_USE_INSTALLED_DEEPSPEED": "1",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        # DeepSpeed counts processors as devices by this.
        "LOCAL_SIZE": str(RANKS_MAX),
    }


def outcomes(folder: Path) -> dict[str, Outcome]:
    """Return what the plugin has noted in *folder*."""
    path = folder / OUTCOMES
    if not path.exists():
        raise SystemExit(f"error: no test was run; the end of pytest's output:\n{(folder / 'log').read_text()[-2000:]}")
    found: dict[str, Outcome] = {}
    before: dict[str, int] = {}
    for line in path.read_text().splitlines():
        note = json.loads(line)
        begun = before.setdefault(note["test"], note["saves"])
        found[note["test"]] = Outcome(note["outcome"], note["stage"], note["saves"] - begun, note["reason"])
    return found


def outcome(way: str, test: str, each: Mapping[str, Outcome]) -> Outcome:
    """Return what came of *test*, which may be known not to run the way *way*."""
    is_limit = any(test.startswith(f"unit/checkpoint/{name}") for name in LIMITS.get(way, ()))
    return LIMIT if is_limit else each.get(test, NOT_RUN)


def judged(found: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Return what is wrong: what hangs, or passes plain and not another way, or not with as many saves."""
    wrong = []
    for way, each in found.items():
        for test, plain in found["plain"].items():
            other = outcome(way, test, each)
            is_same = (other.outcome, other.saves) == (plain.outcome, plain.saves)
            if plain.outcome == "hung" or (plain.outcome == "passed" and other is not LIMIT and not is_same):
                wrong.append(f"{way}: {test}: {other}, and plain {plain}\n{other.reason}")
    return wrong


def counts(found: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Return the limits, and how many tests of each stage ended how; for other ways, of those that passed plain."""
    lines = [f"limit, {way}: {name}: {why}" for way in found for name, why in LIMITS.get(way, {}).items()]
    counted = {test: plain for test, plain in found["plain"].items() if plain.outcome == "passed"}
    for way, each in found.items():
        tests = found["plain"] if way == "plain" else counted
        words = Counter((plain.stage, outcome(way, test, each).outcome) for test, plain in tests.items())
        lines += (f"{way}, stage {stage}: {number} {word}" for (stage, word), number in sorted(words.items()))
    return lines


def main() -> None:
    """Run the tests; exit with 1 where something that passes plain fails another way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the folder of DeepSpeed's repository")
    parser.add_argument("--stages", type=int, nargs="+", default=(1, 2, 3), help="of ZeRO, by default all")
    asked = parser.parse_args()
    if not (asked.checkout / "tests/unit/checkpoint").is_dir():
        parser.error(f"{asked.checkout} has no tests/unit/checkpoint: name a checkout of DeepSpeed's repository")
    claimed = claim()
    subprocess.run([sys.executable, "-m", "tests.operators"], check=True)  # a test that has to compile takes too long
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        checkout, tests, found = asked.checkout.resolve(), ["unit/checkpoint"], dict[str, dict[str, Outcome]]()
        for way in WAYS:
            found[way] = run(checkout, Path(folder) / way, asked.stages, tests)
            tests = [test for test, plain in found["plain"].items() if plain.outcome == "passed"]
    if claimed is not None:
        claimed.release()
    wrong = judged(found)
    print(*wrong, *counts(found), sep="\n")
    sys.exit(1 if wrong or not any(each.outcome == "passed" for each in found["plain"].values()) else 0)


if __name__ == "__main__":
    main()
