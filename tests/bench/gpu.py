"""
What saves cost a training on one GPU: a model of 1 to 3 billion parameters under ZeRO-3, with every way to save.

One process, a few seconds of training between two saves. A row is written for each system as soon as its job is done:
the same command goes on where it was interrupted, or where its time was over. Without a GPU it runs on the CPU, tiny.

Blocked is what one save holds training up: inside the call, before updates that wait for its copies, and until the
save before it is on disk, where a system has only one on its way. What a job takes beyond that, compared with the same
steps without saves, is what copies and coding cost while training computes.
"""

import os
import platform
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import ClassVar

from layerstore import Keep
from layerstore.live.saver.options import SaverKeywords
from tests.bench.loop_job import Training
from tests.bench.measure import disk_bytes, make_empty, seconds_of, seconds_until
from tests.bench.peers import systems
from tests.bench.peers.state import Engine
from tests.bench.report import Bar, Table
from tests.bench.rows import Row, Rows
from tests.bench.shapes import ModelShape
from tests.ranks.launch import free_port, search_path

SECONDS_MAX = 450
SAVES = 2
INTERVAL_SECONDS = 8.0
"""Of training, from one save to the next."""
SEQUENCE = 2048
JOB_MOST = 1.10
"""How much longer than without saves a job with compact saves may take."""

PARAMETERS_MIN, PARAMETERS_MAX = 1_000_000_000, 3_000_000_000
_HIDDEN = 2048
_VOCAB = 32_000
_TINY = ModelShape(layers=2, hidden=64, intermediate=128, vocab=256)

DEVICE_BYTES = 20
"""Of a parameter: weights, gradients, their sums in single precision, master and moments."""
ACTIVATION_BYTES = 16 * 10**9
HOST_BYTES = 36
"""Of a parameter: the copies of three saves, pinned."""
DISK_BYTES = 40
"""Of a parameter: three exact saves, of which the oldest is being removed."""
TIMED_BYTES = 250
"""Of a parameter: what all systems write."""


def fitting(*, device: int, host: int, disk: int, disk_bytes_per_second: float) -> int:
    """
    Return how many parameters to train, for the bytes that are free; not fewer than make the figures mean something.

    >>> fitting(device=80 * 10**9, host=120 * 10**9, disk=60 * 10**9, disk_bytes_per_second=10**9)
    1200000000
    """
    least = min((device - ACTIVATION_BYTES) // DEVICE_BYTES, host // HOST_BYTES, disk // DISK_BYTES)
    in_time = int(disk_bytes_per_second * 300 / TIMED_BYTES)
    return max(min(least, in_time, PARAMETERS_MAX), PARAMETERS_MIN)


def shape_of(parameters: int) -> ModelShape:
    """Return a Llama of about so many *parameters*."""
    block = 4 * _HIDDEN**2 + 3 * _HIDDEN * (intermediate := _HIDDEN * 11 // 4) + 2 * _HIDDEN
    layers = max(1, round((parameters - 2 * _VOCAB * _HIDDEN) / block))
    return ModelShape(layers=layers, hidden=_HIDDEN, intermediate=intermediate, vocab=_VOCAB, world_size=1)


# -- systems -------------------------------------------------------------------------------------------------------


class Exact(systems.Layerstore):
    """A saver of this project; the newest two saves are kept, as those of others."""

    name = "layerstore, exact"
    options: ClassVar[SaverKeywords] = {"keep": Keep(last=2)}

    def written_bytes(self) -> int:
        """Return what all saves have written."""
        assert self._saver is not None
        return self._saver.status().written_bytes


class Delta8(Exact):
    """The same, compact but for the first save."""

    name = "layerstore, delta8"
    options: ClassVar[SaverKeywords] = {"keep": Keep(last=2), "precision": "delta8"}


class Delta4(Exact):
    """The same in fewer bits."""

    name = "layerstore, delta4"
    options: ClassVar[SaverKeywords] = {"keep": Keep(last=2), "precision": "delta4"}


class FastDeepSpeed(systems.DeepSpeed):
    """``engine.save_checkpoint`` with DeepSpeed's own writer, which asks the disk directly."""

    name = "DeepSpeed, fast writer"
    writer: ClassVar[dict[str, object]] = {"type": "fast"}

    def __init__(self, engine: Engine, folder: Path) -> None:
        from deepspeed.runtime.model_checkpointing.config import get_checkpoint_writer_config

        super().__init__(engine, folder)
        self._before = engine.checkpoint_engine
        config = engine._config.checkpoint_config
        engine._config.checkpoint_config = config | {"writer": get_checkpoint_writer_config({"writer": self.writer})}
        try:
            engine._configure_checkpointing()
        finally:
            engine._config.checkpoint_config = config

    def close(self) -> None:
        """Give the engine its own writer back."""
        self.engine.checkpoint_engine = self._before


class DecoupledDeepSpeed(FastDeepSpeed):
    """The same from a process of its own; the next update waits until it is done."""

    name = "DeepSpeed, decoupled"
    writer: ClassVar[dict[str, object]] = {"type": "fast", "decoupled": True}
    is_waited_for_beside = False

    def __init__(self, engine: Engine, folder: Path) -> None:
        super().__init__(engine, folder)
        self._commit = engine._commit_decoupled_checkpoint
        engine._commit_decoupled_checkpoint = self._committed
        self._pool = ThreadPoolExecutor(1)
        self._begun, self._elsewhere = 0.0, 0.0
        self._durable: Future[float] | None = None

    def save(self) -> None:
        """Begin a save."""
        self._begun, self._durable = time.monotonic(), None
        super().save()

    def wait(self) -> None:
        """Wait for the process, and until its files are synced."""
        self._committed()
        self.durable_seconds()

    def blocked_elsewhere(self) -> float:
        """Return how long updates have waited."""
        return self._elsewhere

    def durable_seconds(self) -> float:
        """Return how long the newest save took."""
        assert self._durable is not None
        return self._durable.result()

    def close(self) -> None:
        """End the process."""
        self.engine._commit_decoupled_checkpoint = self._commit
        self.engine.checkpoint_engine.cleanup()
        self._pool.shutdown()
        super().close()

    def _committed(self) -> None:
        started = time.monotonic()
        self._commit()
        self._elsewhere += time.monotonic() - started
        if self._begun and self._durable is None:
            self._durable = self._pool.submit(self._synced, self._begun)

    def _synced(self, begun: float) -> float:
        self.sync()
        return time.monotonic() - begun


class PlainDecoupledDeepSpeed(DecoupledDeepSpeed):
    """The same with Python's own files, which any machine has."""

    name = "DeepSpeed, decoupled, Python's files"
    writer: ClassVar[dict[str, object]] = {"type": "python", "decoupled": True}


SYSTEMS: tuple[type[systems.System], ...] = (
    Exact,
    Delta8,
    Delta4,
    systems.DeepSpeed,
    systems.AsyncDistributed,
    systems.Torchsnapshot,
    PlainDecoupledDeepSpeed,
    DecoupledDeepSpeed,
    FastDeepSpeed,
)
"""In the order in which they run: what the time does not suffice for comes last."""


# -- the jobs ------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Job:
    """The same steps with one way to save; times are in seconds."""

    system: str
    parameters: int
    bare: float
    """What the steps take without saves."""
    steps: int
    first: float = 0.0
    """The save before the job, until it was on disk."""
    first_bytes: int = 0
    seconds: float = 0.0
    """From the first of the counted saves until the last one is on disk, and every step is done."""
    blocked: list[float] = field(default_factory=list)
    beside: float = 0.0
    """What the steps took longer than without saves, waits in them aside."""
    durable: list[float] = field(default_factory=list)
    bytes: int = 0
    """Of one save after the first, on average."""
    device_bytes: int = 0
    """The most memory of the device that it took, beyond that of the training."""


class Bench:
    """A training, and the jobs that it does."""

    def __init__(self, training: Training, folder: Path, *, every: int | None = None) -> None:
        import torch

        self._training, self._folder, self._is_cuda = training, folder, torch.cuda.is_available()
        *_, step = self._steps(4)  # the first are slow
        self._every = every or max(ceil(INTERVAL_SECONDS / step), 2)
        self.bare = sum(self._steps(SAVES * self._every))
        self._device_bytes = self._peak()

    def job(self, kind: type[systems.System]) -> Job:
        """Do the job with one system."""
        make_empty(self._folder)
        self._peak()
        job = Job(system=kind.name, parameters=self._training.parameters, bare=self.bare, steps=SAVES * self._every)
        system = kind(self._training.engine, self._folder)
        try:
            self._first(system, job)
            with ThreadPoolExecutor(1) as pool:
                self._saves(system, job, pool)
        finally:
            system.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        job.device_bytes = max(self._peak() - self._device_bytes, 0)
        return job

    def _first(self, system: systems.System, job: Job) -> None:
        """Save once: buffers are made, and what is compact has an exact save to refer to."""
        started = time.monotonic()
        system.save()
        system.wait()
        job.first = time.monotonic() - started
        job.first_bytes = _written(system)
        self._training.step()

    def _saves(self, system: systems.System, job: Job, pool: ThreadPoolExecutor) -> None:
        removing, in_steps, elsewhere = 0.0, 0.0, system.blocked_elsewhere()
        waiting: Future[float] | None = None
        self._settle()
        started = time.monotonic()
        for _ in range(SAVES):
            blocked = time.monotonic()
            if waiting is not None:
                job.durable.append(waiting.result())
            job.blocked.append(time.monotonic() - blocked)
            removing += seconds_of(system.forget_earlier)
            before, begun = system.blocked_elsewhere(), time.monotonic()
            system.save()
            job.blocked[-1] += time.monotonic() - begun
            if system.is_waited_for_beside:
                waiting = pool.submit(seconds_until, system.wait, begun)
            in_steps += sum(self._steps(self._every))
            job.blocked[-1] += system.blocked_elsewhere() - before
            if isinstance(system, DecoupledDeepSpeed):
                job.durable.append(system.durable_seconds())
        if waiting is not None:
            job.durable.append(waiting.result())
        else:
            system.wait()
        job.seconds = time.monotonic() - started - removing
        job.beside = in_steps - self.bare - (system.blocked_elsewhere() - elsewhere)
        if isinstance(system, systems.Layerstore):
            job.durable = _visible(system)
        written = _written(system)
        job.bytes = (written - job.first_bytes) // SAVES if isinstance(system, Exact) else written

    def _steps(self, count: int) -> list[float]:
        return [seconds_of(self._step) for _ in range(count)]

    def _step(self) -> None:
        """Make one step, and wait for it alone: copies go on beside."""
        import torch

        self._training.step()
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()

    def _settle(self) -> None:
        import torch

        os.sync()
        if self._is_cuda:
            torch.cuda.synchronize()

    def _peak(self) -> int:
        """Return the most memory that was used of the device since the last call."""
        import torch

        if not self._is_cuda:
            return 0
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peak


def _written(system: systems.System) -> int:
    """Return the bytes of all saves of this project, or else of the newest."""
    return system.written_bytes() if isinstance(system, Exact) else disk_bytes(system.latest)


def _visible(system: systems.Layerstore) -> list[float]:
    assert system._saver is not None
    timings = system._saver.store.timings(systems.RUN)
    return [timing.visible_seconds for timing in timings if timing.visible_seconds is not None][-SAVES:]


# -- the whole -----------------------------------------------------------------------------------------------------


def run(folder: Path, *, rows: Path, is_tiny: bool, parameters: int | None = None) -> None:
    """Do what is missing in *rows*, as far as the time goes, and print the table; data come into *folder*."""
    started, found = time.monotonic(), Rows(rows)
    is_cuda = _join()
    is_tiny = is_tiny or not is_cuda
    earlier = found.find(kind="machine", is_tiny=is_tiny)
    wanted = earlier[-1]["parameters"] if earlier else parameters
    shape = _TINY if is_tiny else shape_of(wanted or _fitting(folder))
    training = Training(shape, sequence=8 if is_tiny else SEQUENCE)
    if not earlier:
        found.add(_machine(is_cuda) | {"is_tiny": is_tiny, "parameters": training.parameters})
    bench = Bench(training, folder / "data", every=2 if is_tiny else None)
    longest = 0.0
    for kind in _missing(found, training.parameters):
        begun = time.monotonic()
        if begun - started + longest > SECONDS_MAX:
            print(f"no time left for {kind.name}: the same command goes on", flush=True)
            continue
        found.add(_row(bench, kind, training.parameters))
        longest = max(longest, time.monotonic() - begun)
        print(f"  {time.monotonic() - started:.0f} s: {kind.name}", flush=True)
    print("\n".join(["", *lines(found, training.parameters)]), flush=True)


def _missing(found: Rows, parameters: int) -> Iterator[type[systems.System]]:
    for kind in SYSTEMS:
        if not found.find(kind="job", system=kind.name, parameters=parameters):
            yield kind


def _row(bench: Bench, kind: type[systems.System], parameters: int) -> Row:
    """Return what the job with one system found, or why there was none."""
    absent = {"kind": "absent", "system": kind.name, "parameters": parameters}
    if missing := kind.missing():
        return absent | {"reason": missing}
    try:
        return {"kind": "job", **asdict(bench.job(kind))}
    except Exception as exc:  # noqa: BLE001  # other people's code may raise anything
        return absent | {"reason": f"{type(exc).__name__}: {str(exc).strip().partition(chr(10))[0]}"}


def lines(found: Rows, parameters: int) -> Iterator[str]:
    """Yield the table of the rows for a model of *parameters* parameters, and which promises are kept."""
    jobs = {row["system"]: row for row in found.find(kind="job", parameters=parameters)}
    absent = {row["system"]: row["reason"] for row in found.find(kind="absent", parameters=parameters)}
    table = Table(
        title=f"{parameters / 1e9:.2f} billion parameters: medians; a job with saves, compared with one without",
        header=("", "blocked", "beside, each", "job", "durable", "bytes", "first", "device"),
        lines=tuple(_line(name, jobs[name]) for name in (kind.name for kind in SYSTEMS) if name in jobs),
    )
    yield from [*table.text(), ""]
    yield from (f"not run: {name}: {reason}" for name, reason in absent.items() if name not in jobs)
    for name in (Delta8.name, Delta4.name):
        if name in jobs:
            yield Bar(what=f"{name}: job / none", value=_ratio(jobs[name]), most=JOB_MOST).text()


def _line(name: str, row: Row) -> tuple[str, ...]:
    saves = len(row["blocked"])
    return (
        name,
        f"{median(row['blocked']) * 1e3:,.1f} ms",
        f"{row['beside'] / saves * 1e3:,.1f} ms",
        f"{_ratio(row):.3f}",
        f"{mean(row['durable']):.2f} s",
        f"{row['bytes'] / row['parameters']:.2f}",
        f"{row['first_bytes'] / row['parameters']:.2f}",
        f"{row['device_bytes'] / 1e6:,.0f} MB",
    )


def _ratio(row: Row) -> float:
    return float(row["seconds"] / row["bare"])


def _join() -> bool:
    """Be the only rank; return whether there is a GPU."""
    os.environ["PATH"] = search_path()
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    import torch

    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    deepspeed.init_distributed("nccl" if is_cuda else "gloo")
    return is_cuda


def _fitting(folder: Path) -> int:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    device, _ = torch.cuda.mem_get_info()
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    speed = _disk_bytes_per_second(folder / "probe")
    return fitting(device=device, host=host, disk=shutil.disk_usage(folder).free, disk_bytes_per_second=speed)


def _disk_bytes_per_second(path: Path) -> float:
    block, count, started = os.urandom(1 << 24), 64, time.monotonic()
    with path.open("wb") as file:
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()
    return len(block) * count / (time.monotonic() - started)


def _machine(is_cuda: bool) -> Row:
    import deepspeed
    import torch

    return {
        "kind": "machine",
        "device": torch.cuda.get_device_name() if is_cuda else "CPU",
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
    }
