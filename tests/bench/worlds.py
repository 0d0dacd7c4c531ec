"""
What many ranks cost: the same bytes in 52 objects for each of them, so smaller ones the more there are.

Ingest and compose as `verbs` has them, beside copies in the same rounds, with the processor seconds for each GB, the
function calls for each object, and the limit: what the bytes take that each verb cannot avoid to read, hash and write.
"""

import cProfile
import os
import pstats
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from layerstore.hashing import crc32, digest
from layerstore.limits import IO_CHUNK_BYTES
from tests.bench.generate import Layout, generate_size
from tests.bench.measure import Contender, Timing, alternate, median_seconds, own_cpu_seconds
from tests.bench.verbs import COPY, DURABLE_COPY, VERBS, Workplace

_ROWS = ("ingest", "ingest again", "ingest again, store trusted", "compose")
_OBJECTS_OF_A_RANK = 52
_SAMPLE_BYTES = 1 << 28


def run(folder: Path, *, gb: float, worlds: list[int], layout: Layout, rounds: int) -> None:
    """Print a table for each number of ranks: every verb beside the copies of its own rounds."""
    limits = _limits(folder)
    for world in worlds:
        source = generate_size(folder / f"{world}/checkpoint-1", gb, layout=layout, world_size=world)
        place = Workplace(folder, source)
        print(f"\n{place.size_bytes / 2**30:.2f} GiB, {layout}, {world} ranks; page cache warm", flush=True)
        print(
            f"{'':<30}{'median':>8}{'x cp':>7}{'x cp+sync':>11}{'cpu/GB':>8}{'limit':>7}{'calls':>7}{'cp':>8}"
            f"{'cp+sync':>9}{'peak MB':>9}"
        )
        for verb in VERBS:
            contenders = [of for of in place.contenders(verb) if of.name in {COPY, DURABLE_COPY, *_ROWS}]
            timings = alternate(contenders, rounds=rounds, tell=lambda line: None)
            calls = {of.name: _calls(of) / (_OBJECTS_OF_A_RANK * world) for of in contenders}
            _print_rows(timings, calls, limits, gb=place.size_bytes / 1e9)
        place.close()


def _print_rows(
    timings: dict[str, list[Timing]], calls: dict[str, float], limits: dict[str, float], *, gb: float
) -> None:
    medians = {name: median_seconds(runs) for name, runs in timings.items()}
    copy, durable = medians.pop(COPY), medians.pop(DURABLE_COPY)
    for name, seconds in medians.items():
        cpu = sorted(run.cpu_seconds for run in timings[name])[len(timings[name]) // 2] / gb
        peak = max(run.anonymous_bytes for run in timings[name]) / 1e6
        print(
            f"{name:<30}{seconds:>7.2f}s{seconds / copy:>7.2f}{seconds / durable:>11.2f}{cpu:>7.2f}s"
            f"{limits[name]:>6.2f}s{calls[name]:>7.0f}{copy:>7.2f}s{durable:>8.2f}s{peak:>9.0f}",
            flush=True,
        )


def _calls(contender: Contender) -> int:
    """Return how many functions, Python's own included, one run calls in all its threads."""
    profiles: list[cProfile.Profile] = []

    def begin(frame: FrameType, event: str, argument: object) -> None:
        sys.setprofile(None)
        profiles.append(cProfile.Profile())
        profiles[-1].enable()

    contender.prepare()
    main = cProfile.Profile()
    threading.setprofile(begin)
    try:
        main.runcall(contender.run)
    finally:
        threading.setprofile(None)
    found = pstats.Stats(main)
    for profile in profiles:
        if profile.getstats():  # an idle thread has none
            found.add(profile)
    return found.total_calls  # type: ignore[attr-defined,no-any-return]  # its stub lacks what it prints


def _limits(folder: Path) -> dict[str, float]:
    """Return the processor seconds for each GB that reading, hashing and writing take by themselves, by verb."""
    chunk = memoryview(bytearray(IO_CHUNK_BYTES))
    offsets = range(0, _SAMPLE_BYTES, IO_CHUNK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file, tempfile.TemporaryFile(dir=folder) as other:
        fd, copied = file.fileno(), other.fileno()
        write = _seconds_for_a_gb(lambda: [os.pwrite(fd, chunk, offset) for offset in offsets])
        read = _seconds_for_a_gb(lambda: [os.preadv(fd, [chunk], offset) for offset in offsets])
        copy = _seconds_for_a_gb(
            lambda: [os.copy_file_range(fd, copied, IO_CHUNK_BYTES, offset, offset) for offset in offsets]
        )
    name = _seconds_for_a_gb(lambda: [digest(chunk) for _ in offsets])
    zip_checksum = _seconds_for_a_gb(lambda: [crc32(chunk) for _ in offsets])
    print(
        f"processor seconds for each GB: read {read:.2f}, written {write:.2f}, copied {copy:.2f}, "
        f"named {name:.2f}, CRC32 {zip_checksum:.2f}"
    )
    source = read + name + zip_checksum
    return dict(zip(_ROWS, (source + write, source + read + name, source, read + name + copy), strict=True))


def _seconds_for_a_gb(work: Callable[[], object]) -> float:
    started = own_cpu_seconds()
    work()
    return (own_cpu_seconds() - started) / (_SAMPLE_BYTES / 1e9)
