"""
What checkpoints cost a training: the same ZeRO-3 job on two CPU ranks with every way to save, in turns.

Blocked is what one save holds training up: inside the call, and for layerstore also before updates that wait for
copies. A job is timed until all that it saved is there.
Bytes are counted on disk, in a rehearsal in which every save ends before the next begins.

A job that saves every step keeps the newest few, on the disk or in memory; it is compared with one that saves nothing.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench.loop_job import BATCH, DEEPSPEED, EACH_STEP, KEPT, NONE, SEQUENCE, VARIANTS, Job, Result
from tests.bench.ranked import RANKS, result_of
from tests.bench.report import Bar, Table

MEMORY = "/dev/shm"
JOB_MOST = 1.10
"""How much longer than without saves a job may take that saves every step."""


def run(
    folder: Path,
    *,
    gb: float,
    rounds: int,
    saves: int,
    every: int,
    tokens: int = BATCH * SEQUENCE,
    is_patient: bool = True,
) -> Result:
    """
    Run the job, each rank with *tokens* a step, and print its table.

    Unless *is_patient*, nothing waits until the machine is quiet: the figures mean nothing then.
    """
    print(
        f"{RANKS} CPU ranks; {rounds} rounds of {saves} saves, one every {every} steps of {tokens} tokens", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="layerstore-bench-", dir=MEMORY) as memory:
        found = result_of(
            "tests.bench.loop_job",
            folder,
            gb=gb,
            rounds=rounds,
            saves=saves,
            every=every,
            tokens=tokens,
            memory=memory,
            is_patient=int(is_patient),
        )
    result = Result(**found | {"jobs": [Job(**job) for job in found["jobs"]]})
    size = f"{result.parameters / 1e6:.1f} million parameters, state {result.state_bytes / 1e9:.2f} GB over all ranks"
    lines = each_step(result, saves) if every == 1 else _table(result)
    print("\n".join([size, "", *lines]), flush=True)
    return result


def each_step(result: Result, saves: int) -> Iterator[str]:
    """Yield the table of jobs that save every step, and which of them take as little more time as was promised."""
    bare = _median(result, NONE.name)
    table = Table(
        title=f"{saves} steps, each saved, the newest {KEPT} saves kept; times of the whole job, medians",
        header=("", "seconds", "x none", "cpu", "blocked", "durable", "first save", "later ones", "in all", "others"),
        lines=tuple(_each_step_line(result, variant.name) for variant in EACH_STEP),
    )
    yield from [*table.text(), f"a step takes {bare / saves:.2f} s", ""]
    for variant in EACH_STEP:
        if variant.name.startswith("delta"):
            ratio = _median(result, variant.name) / bare
            yield Bar(what=f"{variant.name}: whole job / none", value=ratio, most=JOB_MOST).text()


def _each_step_line(result: Result, name: str) -> tuple[str, ...]:
    jobs, seconds = _jobs(result, name), _median(result, name)
    times = (
        f"{seconds:.2f}",
        f"{seconds / _median(result, NONE.name):.3f}",
        f"{statistics.median(job.cpu_seconds for job in jobs):.2f} s",
    )
    others = f"{statistics.mean(job.others_share for job in jobs):.0%}"
    if name == NONE.name:
        return (name, *times, "", "", "", "", "", others)
    durable = [each for job in jobs for each in job.durable]
    return (
        name,
        *times,
        f"{statistics.median(_blocked(result, name)) * 1e3:.1f} ms",
        f"{statistics.median(durable):.2f} s" if durable else "-",
        *(f"{size / 1e6:.1f} MB" for size in (result.sizes[name][0], _steady(result, name))),
        f"{statistics.median(job.written_bytes for job in jobs) / 1e6:.0f} MB",
        others,
    )


def _median(result: Result, variant: str) -> float:
    return statistics.median(job.seconds for job in _jobs(result, variant))


def _jobs(result: Result, variant: str) -> list[Job]:
    return [job for job in result.jobs if job.variant == variant]


def _blocked(result: Result, variant: str) -> list[float]:
    """Return the seconds of all its saves, sorted."""
    return sorted(seconds for job in _jobs(result, variant) for seconds in job.blocked)


def _steady(result: Result, variant: str) -> float:
    return statistics.mean(result.sizes[variant][1:])


def _table(result: Result) -> Iterator[str]:
    base, base_bytes = statistics.median(_blocked(result, DEEPSPEED.name)), _steady(result, DEEPSPEED.name)
    base_seconds = _median(result, DEEPSPEED.name)
    yield (
        f"{'':<24}{'blocked':>10}{'best':>10}{'worst':>10}{'less':>8}{'job':>9}{'x DS':>6}"
        f"{'durable':>9}{'first save':>12}{'later ones':>12}{'fewer':>8}{'others':>8}"
    )
    for name in (variant.name for variant in VARIANTS):
        blocked, jobs = _blocked(result, name), _jobs(result, name)
        seconds = _median(result, name)
        others = statistics.mean(job.others_share for job in jobs)
        if name == NONE.name:
            yield f"{name:<24}{'':>38}{seconds:>8.2f}s{seconds / base_seconds:>6.2f}{'':>41}{others:>8.0%}"
            continue
        median, steady = statistics.median(blocked), _steady(result, name)
        durable = [each for job in jobs for each in job.durable]
        yield (
            f"{name:<24}{median * 1e3:>7.1f} ms{blocked[0] * 1e3:>7.1f} ms{blocked[-1] * 1e3:>7.1f} ms"
            f"{base / median:>7.1f}x{seconds:>8.2f}s{seconds / base_seconds:>6.2f}"
            f"{f'{statistics.median(durable):.2f}s' if durable else '':>9}"
            f"{result.sizes[name][0] / 1e6:>9.0f} MB{steady / 1e6:>9.0f} MB{base_bytes / steady:>7.2f}x"
            f"{others:>8.0%}"
        )
