"""
Compare ingest and compose with ``cp -r`` of the same bytes, in alternating runs inside one warm process.

    python -m tests.bench ingest|reingest|compose|all [--gb 2] [--layout raw|hf] [--odd] [--runs 5] [--profile]
    python -m tests.bench compose --policy parity --dir /mnt/xfs    # two saves mixed; blocks shared where they can be
    python -m tests.bench query [--commits 10000] [--layers 80]
    python -m tests.bench scale [--commits 10000]    # verify and gc on 101 objects for each commit, a million in all
    python -m tests.bench loop [--gb 1] [--rounds 3] [--saves 3] [--every 3]    # a training that saves, two CPU ranks
    python -m tests.bench loop --table    # only computes what saves of real models take
    python -m tests.bench drift [--seeds 3] [--saves 100] [--every 10]    # what drift saves, and what that costs

Prints one table for each verb: median and best time, the ratio of medians to both baselines, processor time,
peak anonymous memory of this process, and how much of the processors others used.
The whole command's time, interpreter's start included, stands beside it; its memory is another process's.
``query`` asks a store with a long history instead, and prints medians, worst times and bars.
``scale`` prints time and memory of verify and gc on a store of very many objects, and of a tenth of them.
``loop`` trains under DeepSpeed ZeRO-3 with every way to save, and prints what that costs the training.
``drift`` trains for long under several policies at once, fails, resumes from each, and compares bytes and losses.
"""

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.bench import drift, loop, loop_table, query, scale
from tests.bench.generate import generate, generate_size
from tests.bench.machine import limits
from tests.bench.measure import Contender, Timing, alternate, best_seconds, median_seconds, rehearse
from tests.bench.stacks import Stacks
from tests.bench.verbs import COPY, DURABLE_COPY, VERBS, Bar, Workplace, bars_for, warm_up


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=[*VERBS, "all", "query", "scale", "loop", "drift"])
    parser.add_argument("--gb", type=float, help="size of the checkpoint in GiB (default: 2; loop: 1, in GB)")
    parser.add_argument("--layout", choices=["raw", "hf"], default="hf")
    parser.add_argument("--odd", action="store_true", help="sizes that divide by nothing, for three ranks")
    parser.add_argument("--policy", default="latest", help="compose two saves, mixed by this policy (default: one)")
    parser.add_argument("--dir", type=Path, help="folder for the data, four times --gb (default: the system's)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="say where the time goes, by one run more of each")
    parser.add_argument("--commits", type=int, default=10_000, help="of the history that is asked (default: 10000)")
    parser.add_argument("--layers", type=int, default=80, help="of each of its commits (default: 80)")
    parser.add_argument("--rounds", type=int, default=3, help="of loop, each with all variants (default: 3)")
    parser.add_argument("--seeds", type=int, default=3, help="of drift, a run for each (default: 3)")
    parser.add_argument("--saves", type=int, help="of each job (default: 3; drift: 100, after the first)")
    parser.add_argument("--every", type=int, help="steps from one to the next (default: 3; drift: 10)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of a sample of loop (default: 64)")
    parser.add_argument("--batch", type=int, default=2, help="samples of a step on each rank (default: 2)")
    parser.add_argument("--table", action="store_true", help="loop: only compute what saves of real models take")
    options = parser.parse_args()
    if options.verb == "loop" and options.table:
        print("\n".join(loop_table.lines()))
        return
    folder = Path(tempfile.mkdtemp(prefix="layerstore-bench-", dir=options.dir))
    try:
        if options.verb == "query":
            query.run(folder, commits=options.commits, layers=options.layers)
            return
        if options.verb == "scale":
            scale.run(folder, commits=options.commits)
            return
        if options.verb == "loop":
            loop.run(folder, _setting(options))
            return
        if options.verb == "drift":
            saves, every = options.saves or 100, options.every or 10
            drift.run(folder, drift.Setting(seeds=options.seeds, saves=saves, every=every))
            return
        gb = 2.0 if options.gb is None else options.gb
        warm_up(folder / "tiny", lambda path: generate(path, layout=options.layout))
        source = folder / "run/checkpoint-2"
        generate_size(source, gb, layout=options.layout, odd=options.odd)
        older = None
        if options.policy != "latest":
            older = generate_size(
                folder / "run/checkpoint-1", gb, layout=options.layout, odd=options.odd, step=1, seed=1
            )
        os.sync()
        place = Workplace(folder, source, older=older, policy=options.policy)
        _print_setting(folder, place, layout=options.layout, odd=options.odd)
        for verb in VERBS if options.verb == "all" else [options.verb]:
            contenders = place.contenders(verb)
            timings = alternate(contenders, rounds=options.runs, tell=_tell)
            print("\n".join(["", *_table(timings, bars_for(folder)), ""]), flush=True)
            if options.profile:
                _print_profiles(contenders)
        place.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _setting(options: argparse.Namespace) -> loop.Setting:
    return loop.Setting(
        gb=1.0 if options.gb is None else options.gb,
        rounds=options.rounds,
        saves=options.saves or 3,
        every=options.every or 3,
        batch=options.batch,
        sequence=options.sequence,
    )


def _tell(line: str) -> None:
    print(f"  {line}", flush=True)


def _print_setting(folder: Path, place: Workplace, *, layout: str, odd: bool) -> None:
    kind = "odd sizes, three ranks" if odd else "page-filling, two ranks"
    print(f"{place.size_bytes / 2**30:.2f} GiB, {layout}, {kind}; {os.cpu_count()} processors, {platform.platform()}")
    print("page cache warm; at best this machine does, in GB/s on one thread:")
    print(", ".join(f"{what} {rate:.1f}" for what, rate in limits(folder)), flush=True)


def _table(timings: dict[str, list[Timing]], bars: Iterable[Bar]) -> Iterator[str]:
    medians = {name: median_seconds(runs) for name, runs in timings.items()}
    best = {name: best_seconds(runs) for name, runs in timings.items()}
    yield f"{'':<34}{'median':>8}{'best':>8}{'x cp':>7}{'x cp+sync':>11}{'cpu':>7}{'peak MB':>9}{'others':>8}  bar"
    for name, runs in timings.items():
        peak = max(run.anonymous_bytes for run in runs) / 1e6
        cpu = sorted(run.cpu_seconds for run in runs)[len(runs) // 2]
        others = sum(run.others_share for run in runs) / len(runs)
        yield (
            f"{name:<34}{medians[name]:>7.2f}s{best[name]:>7.2f}s{medians[name] / medians[COPY]:>7.2f}"
            f"{medians[name] / medians[DURABLE_COPY]:>11.2f}{cpu:>6.2f}s{peak:>9.0f}{others:>8.0%}"
            f"  {_verdict(name, medians, best, bars)}"
        )


def _verdict(name: str, medians: dict[str, float], best: dict[str, float], bars: Iterable[Bar]) -> str:
    for bar in bars:
        if bar.contender == name:
            ratio, ratio_of_best = (found[name] / found[bar.baseline] for found in (medians, best))
            kept = "kept" if ratio <= bar.ratio_max else "missed"
            return f"{ratio:.2f} of {bar.baseline}, at most {bar.ratio_max}: {kept} (by best runs {ratio_of_best:.2f})"
    return ""


def _print_profiles(contenders: list[Contender]) -> None:
    for contender in contenders:
        if contender.name not in (COPY, DURABLE_COPY, "the whole command"):
            rehearse(contender)
            with Stacks() as stacks:
                contender.run()
            print(f"{contender.name}: {stacks.report()}\n", flush=True)


if __name__ == "__main__":
    main()
