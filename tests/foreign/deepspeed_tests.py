"""
DeepSpeed's own tests of checkpoints under ZeRO stage 3, run three ways.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from layerstore.live.ranks import cpu_environment
from tests.environment import REPOSITORY, memory
from tests.foreign.plugin import FOLDER, OUTCOMES
from tests.operators import claim

WAYS = ("plain", "drop-in", "round-trip")

LIMITS: dict[tuple[str, str], str] = {}
"""Why what begins so may fail that way."""

RANKS_MAX = 4

WAY_SECONDS_MAX = 3600


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a test."""

    outcome: str
    """``passed``, ``failed``, ``skipped`` or ``hung``."""
    saves: int
    """How many checkpoints were saved under stage 3."""
    reason: str
    """The traceback, or why it was skipped."""

    def __str__(self) -> str:
        return f"{self.outcome}, {self.saves} saved" if self.outcome == "passed" else self.outcome


def run(checkout: Path, folder: Path) -> dict[str, Outcome]:
    """Run the tests in *checkout* the way that *folder* is called; return what came of each."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "unit/checkpoint", "-p", "tests.foreign.plugin"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors", f"--basetemp={folder / 'pytest'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=checkout / "tests",
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(WAY_SECONDS_MAX)
        finally:
            with suppress(ProcessLookupError):  # ranks that hang outlive their pytest
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcomes(folder)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a pytest and its ranks."""
    return {
        **cpu_environment(),
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
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
        found[note["test"]] = Outcome(note["outcome"], note["saves"] - begun, note["reason"])
    return found


def limit(way: str, test: str) -> str | None:
    """Return why *test* may fail the way *way*, None if it may not."""
    return next((why for (of, part), why in LIMITS.items() if of == way and part in test), None)


def judged(found: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Return what is wrong: what passes plain, and not another way, or not with as many saves."""
    wrong = []
    for way in found:
        for test, plain in found["plain"].items():
            other = found[way].get(test, Outcome("not run", 0, ""))
            is_same = (other.outcome, other.saves) == (plain.outcome, plain.saves)
            if plain.outcome == "passed" and not is_same and (other.outcome == "passed" or not limit(way, test)):
                wrong.append(f"{way}: {test}: {other}, after {plain}\n{other.reason}")
    return wrong


def table(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Return all outcomes as a table, and their counts."""
    lines = ["\t".join(["test", *found])]
    for test in found["plain"]:
        cells = (str(found[way].get(test, "not run")) for way in found)
        lines.append("\t".join([test.removeprefix("unit/checkpoint/"), *cells]))
    counts = []
    for way, each in found.items():
        numbers = Counter(outcome.outcome for outcome in each.values())
        counts.append(f"{way}: " + ", ".join(f"{number} {what}" for what, number in sorted(numbers.items())))
    return "\n".join([*lines, "; ".join(counts)])


def main() -> None:
    """Run the tests; exit with 1 where something that passes plain fails another way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the folder of DeepSpeed's repository")
    parser.add_argument("--how", choices=[*WAYS, "all"], default="all", help="plain is always run; default: all")
    asked = parser.parse_args()
    if not (asked.checkout / "tests/unit/checkpoint").is_dir():
        parser.error(f"{asked.checkout} has no tests/unit/checkpoint: name a checkout of DeepSpeed's repository")
    ways = WAYS if asked.how == "all" else dict.fromkeys(["plain", asked.how])
    claimed = claim()
    subprocess.run([sys.executable, "-m", "tests.operators"], check=True)  # a test that has to compile takes too long
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        found = {way: run(asked.checkout.resolve(), Path(folder) / way) for way in ways}
    if claimed is not None:
        claimed.release()
    wrong = judged(found)
    print(*wrong, table(found), sep="\n")
    sys.exit(1 if wrong or not any(each.outcome == "passed" for each in found["plain"].values()) else 0)


if __name__ == "__main__":
    main()
