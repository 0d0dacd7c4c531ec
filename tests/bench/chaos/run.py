"""
Run ckpt-chaos on DeepSpeed's saves and ours under ZeRO-3, and on the jobs that it ships.

It kills a job at each file event of its saves, or cuts the file in half that was being written. Then it starts the job
again, and compares the result with that of the job that was never killed. Results are kept as JSON lines.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from tests.bench.chaos.job import SAVERS
from tests.bench.rows import Row, Rows
from tests.operators import claim
from tests.ranks.launch import cpu_environment

BUILT_IN = {"hf_trainer": "transformers", "lightning_trainer": "lightning", "dcp_ddp": "torch"}
"""The jobs that ckpt-chaos ships, and the package that each tests."""

VERDICTS = ("PASS", "HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK", "CONTROL_FAIL")
_ROOT = Path(__file__).parents[3]


def run(folder: Path, *, rows: Path | None, points: int, ranks: int) -> None:
    """Run every job on *ranks* ranks, with at most *points* kills each; print a line for each, and add it to *rows*."""
    if find_spec("ckpt_chaos") is None:
        raise SystemExit("this needs ckpt-chaos: pip install ckpt-chaos")
    claim()  # compile DeepSpeed's operators once, and not in each job
    print(f"{'job':<20}{'killed':>7}" + "".join(f"{verdict.lower():>19}" for verdict in VERDICTS), flush=True)
    for row in _found(folder, points=points, ranks=ranks):
        counts = [row["verdicts"].get(verdict, 0) for verdict in VERDICTS]
        print(f"{row['job']:<20}{row['killed']:>7}" + "".join(f"{count:>19}" for count in counts), flush=True)
        if rows is not None:
            Rows(rows).add(row)


def _found(folder: Path, *, points: int, ranks: int) -> Iterator[Row]:
    for saver in SAVERS:
        work = folder / saver
        command = ["run", "--work", work, "--max-points", points, "--ranks", ranks]
        command += ["--result-file", "{out}/final.pt", "--step-regex", r"resumed from step (\d+)"]
        command += ["--", sys.executable, "-m", "tests.bench.chaos.job", "--saver", saver, "--out", "{out}"]
        yield _judged(saver, work, command, ranks=ranks, package="deepspeed" if saver == "deepspeed" else "layerstore")
    for target, package in BUILT_IN.items():
        if find_spec(package) is None:
            print(f"{target:<20}needs {package}: pip install {package}", flush=True)
            continue
        work = folder / target
        yield _judged(
            target, work, ["bench", target, "--work", work, "--ranks", ranks, "--jobs", 1], ranks=ranks, package=package
        )


def _judged(job: str, work: Path, command: list[object], *, ranks: int, package: str) -> Row:
    """Run ckpt-chaos; return its verdict on every kill."""
    from ckpt_chaos.runner import rejudge

    log = work.with_suffix(".log")
    with log.open("wb") as output:
        words = [sys.executable, "-m", "ckpt_chaos", *map(str, command)]
        environment = os.environ | cpu_environment()
        # Its exit status says whether all passed; the verdicts are read from its files.
        subprocess.run(words, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    judged = rejudge(work)
    if not judged:
        raise SystemExit(f"ckpt-chaos has judged nothing of {job}; it says, in {log}:\n{log.read_text()[-2000:]}")
    killed = [row for row in judged if row.crashed or row.verdict == "CONTROL_FAIL"]
    return {
        "job": job,
        "ranks": ranks,
        "killed": len(killed),
        "verdicts": dict(Counter(row.verdict for row in killed)),
        "points": [[row.label, row.verdict] for row in killed],
        "versions": {name: metadata.version(name) for name in ("ckpt-chaos", "torch", package)},
    }
