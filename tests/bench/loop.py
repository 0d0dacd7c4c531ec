"""
What checkpoints cost a training: the same ZeRO-3 job on two CPU ranks with every way to save, in turns.

Blocked is what one save holds training up: inside the call, and for layerstore also before updates that wait for
copies. A job is timed until all that it saved is there.
Bytes are counted on disk, in a rehearsal in which every save ends before the next begins.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.bench.loop_job import DEEPSPEED, NONE, VARIANTS, Job, Result
from tests.bench.ranked import RANKS, result_of


def run(folder: Path, *, gb: float, rounds: int, saves: int, every: int) -> None:
    """Run the job and print its table."""
    print(f"{RANKS} CPU ranks; {rounds} rounds of {saves} saves, one every {every} steps", flush=True)
    found = result_of("tests.bench.loop_job", folder, gb=gb, rounds=rounds, saves=saves, every=every)
    result = Result(**found | {"jobs": [Job(**job) for job in found["jobs"]]})
    size = f"{result.parameters / 1e6:.1f} million parameters, state {result.state_bytes / 1e9:.2f} GB over all ranks"
    print("\n".join([size, "", *_table(result)]), flush=True)


def _jobs(result: Result, variant: str) -> list[Job]:
    return [job for job in result.jobs if job.variant == variant]


def _blocked(result: Result, variant: str) -> list[float]:
    """Return the seconds of all its saves, sorted."""
    return sorted(seconds for job in _jobs(result, variant) for seconds in job.blocked)


def _steady(result: Result, variant: str) -> float:
    return statistics.mean(result.sizes[variant][1:])


def _table(result: Result) -> Iterator[str]:
    base, base_bytes = statistics.median(_blocked(result, DEEPSPEED.name)), _steady(result, DEEPSPEED.name)
    base_seconds = statistics.median(job.seconds for job in _jobs(result, DEEPSPEED.name))
    yield (
        f"{'':<24}{'blocked':>10}{'best':>10}{'worst':>10}{'less':>8}{'job':>9}{'x DS':>6}"
        f"{'durable':>9}{'first save':>12}{'later ones':>12}{'fewer':>8}{'others':>8}"
    )
    for name in (variant.name for variant in VARIANTS):
        blocked, jobs = _blocked(result, name), _jobs(result, name)
        seconds = statistics.median(job.seconds for job in jobs)
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
