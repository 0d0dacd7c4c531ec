"""
What many ranks cost: the same bytes in 52 objects for each of them, so smaller ones the more there are.

Ingest and compose as `verbs` has them, beside copies in the same rounds.
"""

from pathlib import Path

from tests.bench.generate import Layout, generate_size
from tests.bench.measure import Timing, alternate, median_seconds
from tests.bench.verbs import COPY, DURABLE_COPY, VERBS, Workplace

_ROWS = ("ingest", "ingest again", "ingest again, store trusted", "compose")


def run(folder: Path, *, gb: float, worlds: list[int], layout: Layout, rounds: int) -> None:
    """Print a table for each number of ranks: every verb beside the copies of its own rounds."""
    for world in worlds:
        source = generate_size(folder / f"{world}/checkpoint-1", gb, layout=layout, world_size=world)
        place = Workplace(folder, source)
        print(f"\n{place.size_bytes / 2**30:.2f} GiB, {layout}, {world} ranks; page cache warm", flush=True)
        print(f"{'':<30}{'median':>8}{'x cp':>7}{'x cp+sync':>11}{'cpu':>8}{'cp':>8}{'cp+sync':>9}{'peak MB':>9}")
        for verb in VERBS:
            contenders = [of for of in place.contenders(verb) if of.name in {COPY, DURABLE_COPY, *_ROWS}]
            _print_rows(alternate(contenders, rounds=rounds, tell=lambda line: None))
        place.close()


def _print_rows(timings: dict[str, list[Timing]]) -> None:
    medians = {name: median_seconds(runs) for name, runs in timings.items()}
    copy, durable = medians.pop(COPY), medians.pop(DURABLE_COPY)
    for name, seconds in medians.items():
        cpu = sorted(run.cpu_seconds for run in timings[name])[len(timings[name]) // 2]
        peak = max(run.anonymous_bytes for run in timings[name]) / 1e6
        print(
            f"{name:<30}{seconds:>7.2f}s{seconds / copy:>7.2f}{seconds / durable:>11.2f}{cpu:>7.2f}s"
            f"{copy:>7.2f}s{durable:>8.2f}s{peak:>9.0f}",
            flush=True,
        )
