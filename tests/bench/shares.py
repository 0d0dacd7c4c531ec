"""
One command by one, two and four processes, beside a copy of the same bytes: what sharing the work gives on one host.

The seconds are those that the command tells of itself, without the start of the processes, which is told apart.
"""

import json
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import layerstore
from tests.bench.generate import generate_size
from tests.bench.measure import seconds_of
from tests.shares.launch import Job

COUNTS = (1, 2, 4)


def run(folder: Path, *, gb: float, rounds: int) -> None:
    """Print the table."""
    source = generate_size(folder / "run/checkpoint-2", gb, layout="hf")
    out, store = folder / "out", folder / "store"
    layerstore.init(store).close()
    found: dict[str, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))

    def timed(what: str, count: int, *words: str | Path) -> float:
        started = time.monotonic()
        first, *others = Job(*words, "--json", "--store", store, count=count).wait()
        assert all(each.code == 0 for each in (first, *others)), first
        seconds = float(json.loads(first.out.splitlines()[-1])["seconds"])
        found[what][count].append(seconds)
        return time.monotonic() - started - seconds

    starts: dict[int, list[float]] = defaultdict(list)
    for number in range(rounds + 1):  # the first warms up
        found["copy"]["cp -r; sync"].append(seconds_of(lambda: _copy(source, out)))
        shutil.rmtree(out)
        for count in COUNTS:
            shutil.rmtree(store)
            layerstore.init(store).close()
            subprocess.run(["sync"], check=True)
            starts[count].append(timed("ingest", count, "ingest", source, "--run", "r"))
            timed("ingest again", count, "ingest", source, "--run", "r")
            timed("compose", count, "compose", "r", "-o", out)
            shutil.rmtree(out)
        if not number:
            found.clear()
            starts.clear()
    copy = statistics.median(found.pop("copy")["cp -r; sync"])
    print(f"{gb} GiB in {folder.parent}; cp -r; sync: {copy:.2f} s")
    print(f"{'':<16}" + "".join(f"{f'{count} processes':>16}" for count in COUNTS))
    for what, of in found.items():
        cells = (
            f"{statistics.median(of[count]):>9.2f} s {statistics.median(of[count]) / copy:>4.2f}" for count in COUNTS
        )
        print(f"{what:<16}" + "".join(cells))
    print(f"{'to start':<16}" + "".join(f"{statistics.median(starts[count]):>9.2f} s     " for count in COUNTS))


def _copy(source: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", source, out], check=True)
    subprocess.run(["sync"], check=True)
