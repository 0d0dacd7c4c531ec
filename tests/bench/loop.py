"""
What checkpoints cost a training: the same ZeRO-3 job on two CPU ranks with every way to save, in turns.

Blocked is what one save holds training up: inside the call, and for layerstore also before updates that wait for
copies; for DCP also waiting for the save before. A job is timed until all that it saved is there.
Bytes are counted on disk, in a rehearsal in which every save ends before the next begins.
"""

import json
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerstore.live.demo.launch import Ranks
from tests.bench.loop_job import Job, Result
from tests.bench.loop_variants import DEEPSPEED, FULL, NONE, SYNCED, VARIANTS

BLOCKED_RATIO_MAX = 1 / 48
STATE_BYTES_MIN = 1_000_000_000
SECONDS_RATIO_MAX = 1.0
_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How large the job is."""

    gb: float
    rounds: int
    saves: int
    every: int
    batch: int
    sequence: int


def run(folder: Path, setting: Setting) -> None:
    """Run the job and print its tables."""
    print(
        f"{_RANKS} CPU ranks, {os.cpu_count()} processors, {platform.platform()}; "
        f"{setting.rounds} rounds of {setting.saves} saves, one every {setting.every} steps",
        flush=True,
    )
    result = _measured(folder, setting)
    print(
        f"{result.parameters / 1e6:.1f} million parameters in {result.layers} blocks, "
        f"state {result.state_bytes / 1e9:.2f} GB over all ranks\n"
    )
    print("\n".join(_table(result)))
    print("\n".join(["", *_conditions(result, setting), "", *_bars(result)]), flush=True)


def _measured(folder: Path, setting: Setting) -> Result:
    out = folder / "result.json"
    arguments = ["--out", str(out), "--data", str(folder / "data")]
    for name in Setting.__dataclass_fields__:
        arguments += [f"--{name}", str(getattr(setting, name))]
    ranks = Ranks("tests.bench.loop_job", arguments, count=_RANKS, folder=_ROOT, log=folder / "log")
    with ranks:
        for _ in ranks.events():
            pass
    found = json.loads(out.read_text())
    return Result(**found | {"jobs": [Job(**job) for job in found["jobs"]]})


_ROOT = Path(__file__).parents[2]


def _jobs(result: Result, variant: str) -> list[Job]:
    return [job for job in result.jobs if job.variant == variant]


def _blocked(result: Result, variant: str) -> list[float]:
    """Return the seconds of all its saves, sorted."""
    return sorted(seconds for job in _jobs(result, variant) for seconds in job.blocked)


def _added(result: Result, variant: str) -> float:
    """Return what a job takes longer than one without checkpoints: the median of the rounds' differences."""
    pairs = zip(_jobs(result, variant), _jobs(result, NONE.name), strict=True)
    return statistics.median(job.seconds - without.seconds for job, without in pairs)


def _steady(result: Result, variant: str) -> float:
    return statistics.mean(result.sizes[variant][1:])


def _table(result: Result) -> Iterator[str]:
    base, base_bytes = statistics.median(_blocked(result, DEEPSPEED.name)), _steady(result, DEEPSPEED.name)
    base_seconds = statistics.median(job.seconds for job in _jobs(result, DEEPSPEED.name))
    yield (
        f"{'':<24}{'blocked':>10}{'best':>10}{'worst':>10}{'less':>8}{'job':>9}{'added':>9}{'x DS':>6}"
        f"{'durable':>9}{'first save':>12}{'later ones':>12}{'fewer':>8}{'others':>8}"
    )
    for name in (variant.name for variant in VARIANTS):
        blocked, jobs = _blocked(result, name), _jobs(result, name)
        seconds = statistics.median(job.seconds for job in jobs)
        others = statistics.mean(job.others_share for job in jobs)
        if name == NONE.name:
            yield f"{name:<24}{'':>38}{seconds:>8.2f}s{'':>9}{seconds / base_seconds:>6.2f}{'':>41}{others:>8.0%}"
            continue
        median, steady = statistics.median(blocked), _steady(result, name)
        durable = [each for job in jobs for each in job.durable]
        yield (
            f"{name:<24}{median * 1e3:>7.1f} ms{blocked[0] * 1e3:>7.1f} ms{blocked[-1] * 1e3:>7.1f} ms"
            f"{base / median:>7.1f}x"
            f"{seconds:>8.2f}s{_added(result, name):>8.2f}s{seconds / base_seconds:>6.2f}"
            f"{f'{statistics.median(durable):.2f}s' if durable else '':>9}"
            f"{result.sizes[name][0] / 1e6:>9.0f} MB{steady / 1e6:>9.0f} MB{base_bytes / steady:>7.2f}x"
            f"{others:>8.0%}"
        )


def _conditions(result: Result, setting: Setting) -> Iterator[str]:
    without = _jobs(result, NONE.name)
    step = statistics.median(seconds for job in without for seconds in job.steps)
    passes = statistics.median(seconds for job in without for seconds in job.passes)
    durable = max((seconds for job in _jobs(result, FULL.name) for seconds in job.durable), default=0.0)
    yield "what the bars take for granted:"
    yield _held(result.state_bytes >= STATE_BYTES_MIN, f"state {result.state_bytes / 1e9:.2f} GB, at least 1 GB")
    yield _held(True, "pool: as large as all that is due (host_buffer auto)")
    yield _held(
        setting.every * step > durable,
        f"a save every {setting.every} steps of {step:.2f} s, full saves durable after at most {durable:.2f} s",
    )
    yield _held(
        passes > result.memcpy_seconds,
        f"forward and backward {passes:.2f} s, memcpy of the state {result.memcpy_seconds:.2f} s",
    )


def _held(is_so: bool, what: str) -> str:
    return f"  {'yes' if is_so else 'NO':<5}{what}"


def _bars(result: Result) -> Iterator[str]:
    blocked, base = (_blocked(result, variant.name) for variant in (FULL, DEEPSPEED))
    ratio = statistics.median(blocked) / statistics.median(base)
    kept = "kept" if ratio <= BLOCKED_RATIO_MAX else "missed"
    yield f"blocked ≤ 1/48 of engine.save_checkpoint: {kept} (1/{1 / ratio:.0f}; by best 1/{base[0] / blocked[0]:.0f})"
    ratio, best = _job_ratio(result, DEEPSPEED.name)
    kept = "kept" if ratio <= SECONDS_RATIO_MAX else "missed"
    yield f"end to end no slower than with DeepSpeed's saves: {kept} ({ratio:.2f}; by best runs {best:.2f})"
    ratio, best = _job_ratio(result, SYNCED.name)
    yield f"  where DeepSpeed's files are synced like ours: {ratio:.2f}; by best runs {best:.2f}"


def _job_ratio(result: Result, base: str) -> tuple[float, float]:
    """Return how many times as long a job with full saves takes as with those of *base*: the median, and by best."""
    mine, theirs = ([job.seconds for job in _jobs(result, name)] for name in (FULL.name, base))
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True)), min(mine) / min(theirs)
