"""
Time contenders against each other, in turns, on a machine that others use too.

Everything is measured in one process that has done it all once before, and every run is made twice, of which the
second counts: the source is in memory then (page cache warm), and so is the memory that the run fills. A virtual
machine may have given what was unused back to its host, and getting it again costs more than a copy.
In between, what was written is deleted and the disk is synced.
"""

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_QUIET_WAIT_SECONDS_MAX = 5.0
_QUIET_SECONDS = 0.2
_QUIET_BUSY_SHARE_MAX = 0.1
_CHILD_SIGHTINGS = 5


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing that is measured."""

    name: str
    run: Callable[[], None]
    prepare: Callable[[], None]
    """Called before each run, outside the measured time: leaves everything as *run* wants to find it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One run."""

    seconds: float
    cpu_seconds: float
    """Of this process, its threads and its children."""
    anonymous_bytes: int
    """The most memory this process held in it, files that are mapped or cached aside."""
    others_share: float
    """How much of the machine's processors somebody else used meanwhile; the kernel's own flushing is in it."""


class AnonymousPeak:
    """
    Watch how much anonymous memory this process holds.

    Not ``ru_maxrss`` or VmHWM: those never fall again, and count every mapped page of every file.
    A peak shorter than a few milliseconds can be missed.
    """

    _EVERY_SECONDS = 0.005

    def __init__(self) -> None:
        self.size_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._EVERY_SECONDS):
            self.size_bytes = max(self.size_bytes, self._now())

    def _now(self) -> int:
        return anonymous_bytes()


def anonymous_bytes(process: "int | str" = "self") -> int:
    """Return how much anonymous memory this process holds now, or another one."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class FamilyPeak(AnonymousPeak):
    """
    Watch how much memory this process and its children hold, or another one and its children.

    Counted are its anonymous memory, what its children do not share with it, and the largest memory that they do share.
    """

    _EVERY_SECONDS = 0.01

    def __init__(self, process: int | None = None) -> None:
        super().__init__()
        self._process = os.getpid() if process is None else process
        self._sightings = Counter[int]()
        self.size_bytes = self._now()

    def _now(self) -> int:
        # Until a new child has begun a program of its own, its memory is its parent's.
        self._sightings.update(_descendants(self._process))
        old = [child for child, times in self._sightings.items() if times >= _CHILD_SIGHTINGS]
        own = _kilobytes(self._process, "status", "RssAnon", "RssShmem")
        children = [_kilobytes(child, "smaps_rollup", "Private_Dirty", "Pss_Shmem") for child in old]
        private = sum(each[0] for each in (own, *children))
        return 1024 * (private + max(each[1] for each in (own, *children)))


def _descendants(process: int) -> Iterator[int]:
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _kilobytes(process: int, file: str, *names: str) -> list[int]:
    """Return what a file of /proc says about *process*; zeros if it has ended."""
    found = dict.fromkeys(names, 0)
    with suppress(OSError):
        for line in Path(f"/proc/{process}/{file}").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0])
    return list(found.values())


def peak_bytes_of(*words: str) -> int:
    """Return the most anonymous memory that Python holds which is called with *words*."""
    command, peak = [sys.executable, *words], 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.005)
    assert not process.returncode, command
    return peak


def alternate(contenders: Sequence[Contender], *, rounds: int, tell: Callable[[str], None]) -> dict[str, list[Timing]]:
    """Run every contender once per round, each round beginning with another one; return all runs by name."""
    found: dict[str, list[Timing]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        start = number % len(contenders)
        for contender in [*contenders[start:], *contenders[:start]]:
            wait_for_quiet()
            rehearse(contender)
            found[contender.name].append(measure(contender.run))
        latest = (f"{name} {timings[-1].seconds:.2f}" for name, timings in found.items())
        tell(f"round {number + 1}: {', '.join(latest)}")
    return found


def rehearse(contender: Contender) -> None:
    """Make the run that does not count, and leave everything as the one that does wants to find it."""
    contender.prepare()
    contender.run()
    contender.prepare()
    os.sync()


def measure(run: Callable[[], None]) -> Timing:
    """Return what *run* takes."""
    with AnonymousPeak() as peak:
        machine, own, started = machine_busy_seconds(), own_cpu_seconds(), time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        cpu_seconds = own_cpu_seconds() - own
        others_seconds = max(0.0, machine_busy_seconds() - machine - cpu_seconds)
    return Timing(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        anonymous_bytes=peak.size_bytes,
        others_share=others_seconds / seconds / (os.cpu_count() or 1),
    )


def wait_for_quiet() -> None:
    """Wait until hardly anybody uses the processors, but not for ever."""
    deadline = time.monotonic() + _QUIET_WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        before = machine_busy_seconds()
        time.sleep(_QUIET_SECONDS)
        if machine_busy_seconds() - before < _QUIET_BUSY_SHARE_MAX * _QUIET_SECONDS * (os.cpu_count() or 1):
            return


def median_seconds(timings: Sequence[Timing]) -> float:
    """Return the median time."""
    return statistics.median(timing.seconds for timing in timings)


def best_seconds(timings: Sequence[Timing]) -> float:
    """Return the shortest time: the run that others disturbed least."""
    return min(timing.seconds for timing in timings)


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long *work* takes."""
    return seconds_until(work, time.monotonic())


def seconds_until(work: Callable[[], object], started: float) -> float:
    """Return how long after *started* the end of *work* comes."""
    work()
    return time.monotonic() - started


def make_empty(folder: Path) -> None:
    """Leave *folder* there, with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def own_cpu_seconds() -> float:
    """Return what this process, its threads and its children have had of the processors."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def machine_busy_seconds() -> float:
    """Return what everybody has had of the processors, the kernel included."""
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    busy = user + nice + system + interrupts + soft_interrupts + stolen
    return busy / os.sysconf("SC_CLK_TCK")


def disk_bytes(folder: Path) -> int:
    """Return what the files in *folder* take on disk, each once however many names it has."""
    found = [path.lstat() for path in folder.rglob("*") if not path.is_dir()]
    return sum({each.st_ino: 512 * each.st_blocks for each in found}.values())
