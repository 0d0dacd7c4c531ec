"""
Print the figures of docs/reference/measured.md.

    python -m tests.bench ingest|reingest|compose|dcp|universal|all [--gb 2] [--stage 2] [--odd] [--runs 5]
    python -m tests.bench compact [--gb 2] [--runs 3]    # compact saves: their verbs, and the bytes of 100 saves
    python -m tests.bench compose --policy parity --dir /mnt/xfs    # two saves mixed; blocks shared where they can be
    python -m tests.bench worlds [--gb 1.5] [--world 32 128] [--runs 5]    # by many ranks: small objects
    python -m tests.bench query [--commits 10000] [--layers 80]
    python -m tests.bench scale [--commits 10000]    # verify and gc on 101 objects for each commit, a million in all
    python -m tests.bench retention [--commits 600]    # what the rules take of a processor after each commit
    python -m tests.bench collected [--layers 2]       # what the newest three of ten thousand commits take each time
    python -m tests.bench scale-model    # models of 8B on 8 GPUs to 405B on 4,096, without tensors
    python -m tests.bench remote [--gb 1] [--runs 5]    # a bucket behind a link of 100 MB/s; as root, with s3fs
    python -m tests.bench levels [--gb 1] [--rounds 3]  # resuming from memory, and from a bucket behind such a link
    python -m tests.bench shares [--gb 1] [--runs 5]    # by one, two and four processes
    python -m tests.bench loop [--gb 1] [--rounds 3] [--saves 3] [--every 3]    # a training that saves, two CPU ranks
    python -m tests.bench loop --every 1 [--gb 1] [--saves 10] [--tokens 16]    # each step saved, compact or exact
    python -m tests.bench gpu [--rows FILE] [--dir DIR] [--tiny]    # on one GPU, eight minutes; again: goes on
    python -m tests.bench drift [--seeds 3] [--saves 100] [--every 10]    # what drift saves, and what that costs
    python -m tests.bench quality [--seeds 3] [--tiny] [--rows DIR]    # what a mixture costs a fine-tuning
    python -m tests.bench quality [--rows DIR] --trial    # what many policies cost at once, over the histories it kept
    python -m tests.bench quality [--rows DIR] --precision-trial    # what each precision loses of them at once
    python -m tests.bench quality [--rows DIR] --real-model    # SmolLM2-135M, resumed in every precision
    python -m tests.bench quality [--rows DIR] --table | --page    # of rows that are there; into docs/evidence.md
    python -m tests.bench chaos [--points 40] [--ranks 1] [--rows FILE]    # saves that are killed, with ckpt-chaos
    python -m tests.bench peers [--gb 1] [--saves 10] [--rounds 3] [--rows FILE] [--plots DIR]    # what others take
    python -m tests.bench peers --rows FILE --table | --page    # of rows that are there; into docs/benchmarks.md
    python -m tests.bench bisect [--faults 100] [--saves 32]    # planted faults: what is found, in how many trials
    python -m tests.bench delta [--gb 0.3]    # between saves at the learning rates of reinforcement learning
    python -m tests.bench mean [--gb 2] [--saves 10] [--rounds 3]    # ten saves averaged; with mergekit, if it is there

The first five compare with ``cp -r`` of the same bytes, in alternating runs inside one warm process; the whole
command's time, interpreter's start included, stands beside it. ``query`` asks a store with a long history.
``loop`` trains under DeepSpeed ZeRO-3 with every way to save; ``drift`` under several policies, fails, and resumes from
each. ``quality`` keeps what it has in a folder, --dir or one of the system's, and goes on from there. ``peers`` saves,
loads and composes the same state with other tools, those that are installed.
"""

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.bench import (
    averages,
    bisect,
    chaos,
    compact,
    delta,
    drift,
    gpu,
    levels,
    loop,
    query,
    remote,
    retention,
    scale,
    scale_model,
    shares,
    worlds,
)
from tests.bench.generate import Layout, generate, generate_size
from tests.bench.measure import Timing, alternate, best_seconds, median_seconds
from tests.bench.peers import run as peers
from tests.bench.quality import run as quality
from tests.bench.quality.real_model import HANDFUL, WHOLE
from tests.bench.quality.settings import REAL, TINY
from tests.bench.verbs import COPY, DURABLE_COPY, VERBS, Verb, Workplace, warm_up


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = [*VERBS, "all", "compact", "worlds", "query", "scale", "scale-model", "remote", "shares", "loop", "drift"]
    verbs += [
        "quality",
        "peers",
        "gpu",
        "chaos",
        "mean",
        "bisect",
        "delta",
        "retention",
        "collected",
        "levels",
    ]
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("--gb", type=float, help="size of the checkpoint in GiB (default: 2; worlds: 1.5; loop: 1 GB)")
    parser.add_argument("--layout", choices=["raw", "hf"], help="default: hf; worlds, compact: raw")
    parser.add_argument("--world", type=int, nargs="+", default=[2, 32, 128], help="of worlds (default: 2, 32, 128)")
    parser.add_argument("--odd", action="store_true", help="sizes that divide by nothing, for three ranks")
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=3, help="of ZeRO (default: 3)")
    parser.add_argument("--policy", default="latest", help="compose two saves, mixed by this policy (default: one)")
    parser.add_argument("--dir", type=Path, help="folder for the data, four times --gb (default: the system's)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--commits", type=int, help="of the history (default: 10000; retention: 600)")
    parser.add_argument("--layers", type=int, default=80, help="of each of its commits (default: 80)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of loop, peers and mean, each with all variants (default: 3)"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of drift and quality, a run for each (default: 3)")
    parser.add_argument(
        "--saves",
        type=int,
        help="of each job (default: 3, or 10 if each step is saved; drift: 100, after the first; peers, mean: 10)",
    )
    parser.add_argument("--every", type=int, help="steps from one to the next (default: 3; drift: 10)")
    parser.add_argument("--tokens", type=int, default=16, help="of each rank in a step of loop (default: 16)")
    parser.add_argument("--tiny", action="store_true", help="quality, peers or gpu, so small that it ends in a minute")
    parser.add_argument("--rows", type=Path, help="where results are kept: a folder for quality, else a file")
    parser.add_argument("--table", action="store_true", help="only print what quality or peers has found, and draw it")
    parser.add_argument("--trial", action="store_true", help="ask many policies over the histories that quality kept")
    parser.add_argument("--precision-trial", action="store_true", help="ask what each precision loses of them at once")
    parser.add_argument("--real-model", action="store_true", help="resume SmolLM2-135M in every precision of quality")
    parser.add_argument("--plots", type=Path, help="folder for pictures of what quality or peers has found")
    parser.add_argument(
        "--page", action="store_true", help="only write what was found into docs/benchmarks.md or evidence.md"
    )
    parser.add_argument("--llmtailor", type=Path, help="a clone of LLMTailor, for peers to run its merge")
    parser.add_argument("--faults", type=int, default=100, help="of bisect (default: 100)")
    parser.add_argument("--points", type=int, default=40, help="of chaos: kills of each job, at most (default: 40)")
    parser.add_argument("--ranks", type=int, default=1, help="of chaos (default: 1)")
    options = parser.parse_args()
    if options.verb == "quality":
        _run_quality(options)
        return
    if options.verb == "peers":
        _run_peers(options)
        return
    folder = Path(tempfile.mkdtemp(prefix="layerstore-bench-", dir=options.dir))
    print(f"{os.cpu_count()} processors, {platform.platform()}", flush=True)
    try:
        _run_in(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: Path, options: argparse.Namespace) -> None:
    """Run what needs a folder for its data, which is removed afterwards."""
    of, gb, rounds, saves = options, options.gb, options.runs, options.saves
    runs: dict[str, Callable[[], None]] = {
        "worlds": lambda: _run_worlds(folder, of),
        "query": lambda: query.run(folder, commits=of.commits or 10_000, layers=of.layers),
        "scale": lambda: scale.run(folder, commits=of.commits or 10_000),
        "retention": lambda: retention.run(folder, commits=of.commits or 600, layers=of.layers),
        "collected": lambda: retention.run_collected(folder, commits=of.commits or 10_000, layers=of.layers),
        "scale-model": scale_model.run,
        "remote": lambda: remote.run(folder, gb=gb or 1.0, rounds=rounds),
        "chaos": lambda: chaos.run(folder, rows=of.rows, points=of.points, ranks=of.ranks),
        "levels": lambda: levels.run(folder, gb=gb or 1.0, rounds=of.rounds, tokens=of.tokens),
        "shares": lambda: shares.run(folder, gb=gb or 1.0, rounds=rounds),
        "gpu": lambda: gpu.run(folder / "gpu", rows=of.rows or folder / "rows.jsonl", is_tiny=of.tiny),
        "loop": lambda: _run_loop(folder, of),
        "bisect": lambda: bisect.run(folder, faults=of.faults, saves=saves or 32),
        "delta": lambda: delta.run(folder, gb=gb or 0.3),
        "mean": lambda: averages.run(folder, gb=gb or 2.0, saves=saves or 10, rounds=of.rounds),
        "drift": lambda: drift.run(folder, seeds=of.seeds, saves=saves or 100, every=of.every or 10),
    }
    runs.get(options.verb, lambda: _run_verbs(folder, options))()


def _run_worlds(folder: Path, options: argparse.Namespace) -> None:
    warm_up(folder / "tiny", lambda path: generate(path, layout="raw"))
    layout: Layout = options.layout or "raw"
    worlds.run(folder, gb=options.gb or 1.5, worlds=options.world, layout=layout, rounds=options.runs)


def _run_loop(folder: Path, options: argparse.Namespace) -> None:
    every = options.every or 3
    saves = options.saves or (10 if every == 1 else 3)
    loop.run(folder, gb=options.gb or 1.0, rounds=options.rounds, saves=saves, every=every, tokens=options.tokens)


def _run_quality(options: argparse.Namespace) -> None:
    size = TINY if options.tiny else REAL
    if options.page:
        quality.write_page(REAL, rows=options.rows or quality.COMMITTED)
    elif options.real_model:
        quality.try_real_model(HANDFUL if options.tiny else WHOLE, rows=options.rows)
    elif options.precision_trial:
        quality.try_precisions(size, folder=options.dir, rows=options.rows)
    elif options.trial:
        quality.try_policies(size, folder=options.dir, rows=options.rows)
    elif options.table:
        quality.show(size, rows=options.rows or quality.COMMITTED, plots=options.plots)
    else:
        quality.run(size, folder=options.dir, rows=options.rows, seeds=options.seeds, plots=options.plots)


def _run_peers(options: argparse.Namespace) -> None:
    if options.page:
        peers.write_page(options.rows)
    elif options.table:
        peers.show(options.rows or peers.COMMITTED, plots=options.plots)
    else:
        peers.run(
            options.dir,
            gb=0.02 if options.tiny else options.gb or 1.0,
            saves=2 if options.tiny else options.saves or 10,
            rounds=1 if options.tiny else options.rounds,
            is_patient=not options.tiny,
            rows=options.rows,
            plots=options.plots,
            llmtailor=options.llmtailor,
        )


def _run_verbs(folder: Path, options: argparse.Namespace) -> None:
    is_compact = options.verb == "compact"
    layout: Layout = options.layout or ("raw" if is_compact else "hf")
    odd, gb, stage = options.odd, options.gb or 2.0, options.stage
    verbs: Sequence[Verb] = VERBS if options.verb == "all" else [options.verb]
    warm_up(folder / "tiny", lambda path: generate(path, layout=layout), verbs=verbs)
    source = generate_size(folder / "run/checkpoint-2", gb, layout=layout, odd=odd, stage=stage)
    older = None
    if is_compact or options.policy != "latest":
        older = generate_size(folder / "run/checkpoint-1", gb, layout=layout, odd=odd, stage=stage, step=1, seed=1)
    os.sync()
    place = Workplace(folder, source, older=older, policy=options.policy, precision=compact.PRECISION)
    kind = "odd sizes, three ranks" if odd else "page-filling, two ranks"
    print(f"{place.size_bytes / 2**30:.2f} GiB, stage {stage}, {layout}, {kind}; page cache warm", flush=True)
    for verb in verbs:
        timings = alternate(place.contenders(verb), rounds=options.runs, tell=lambda line: print(f"  {line}"))
        print("\n".join(["", *_table(timings), ""]), flush=True)
        if verb == "compact":
            print("\n".join([*(bar.text() for bar in compact.bars(timings)), ""]), flush=True)
    place.close()
    if older is not None and is_compact:
        parameters = compact.parameters_of(gb, is_gathered=layout == "hf", is_odd=odd)
        compact.show_bytes(folder / "bytes", older, source, parameters=parameters)


def _table(timings: dict[str, list[Timing]]) -> Iterator[str]:
    medians = {name: median_seconds(runs) for name, runs in timings.items()}
    yield f"{'':<34}{'median':>8}{'best':>8}{'x cp':>7}{'x cp+sync':>11}{'cpu':>7}{'peak MB':>9}{'others':>8}"
    for name, runs in timings.items():
        peak = max(run.anonymous_bytes for run in runs) / 1e6
        cpu = sorted(run.cpu_seconds for run in runs)[len(runs) // 2]
        others = sum(run.others_share for run in runs) / len(runs)
        yield (
            f"{name:<34}{medians[name]:>7.2f}s{best_seconds(runs):>7.2f}s{medians[name] / medians[COPY]:>7.2f}"
            f"{medians[name] / medians[DURABLE_COPY]:>11.2f}{cpu:>6.2f}s{peak:>9.0f}{others:>8.0%}"
        )


if __name__ == "__main__":
    main()
