"""
``StoreWriter`` and ``StoreReader`` beside PyTorch's own ``FileSystemWriter`` and reader, on the same state.

One rank under gloo. What is written is synced by both, and every save finds an empty folder or store, so that all of
its bytes are new. *Blocked* is what an asynchronous save keeps from training: the call, and what the next update waits
for after some computing.
"""

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import layerstore
from layerstore.dcp import StoreReader, StoreWriter
from tests.bench.measure import Contender, alternate, median_seconds
from tests.bench.report import Bar, Table

_LAYERS = 24
_BYTES_OF_A_PARAMETER = 12
_COMPUTED = 40
"""Products of matrices between an asynchronous save and the next update."""

PLAIN_SAVE, OUR_SAVE = "torch's save, synced", "StoreWriter, save"
PLAIN_LOAD, OUR_LOAD = "torch's load", "StoreReader, load"
PLAIN_ASYNC, OUR_ASYNC = "torch's async_save, blocked", "StoreWriter, async_save, blocked"


def run(folder: Path, *, gb: float, rounds: int) -> None:
    """Print what both take for *gb* GB, and the bars."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    try:
        _run(folder, gb=gb, rounds=rounds)
    finally:
        dist.destroy_process_group()


def _run(folder: Path, *, gb: float, rounds: int) -> None:
    state = _state(gb)
    plain, store = folder / "plain", folder / "store"

    def cleared() -> None:
        shutil.rmtree(plain, ignore_errors=True)
        shutil.rmtree(store, ignore_errors=True)
        layerstore.init(store).close()

    def plainly() -> None:
        save(state, checkpoint_id=plain)
        for path in plain.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def into_store() -> None:
        save(state, storage_writer=StoreWriter(store, run="bench", step=1))

    saves = [Contender(PLAIN_SAVE, plainly, cleared), Contender(OUR_SAVE, into_store, cleared)]
    found = alternate(saves, rounds=rounds, tell=print)
    cleared()
    plainly()
    into_store()
    loads = [
        Contender(PLAIN_LOAD, lambda: load(state, checkpoint_id=plain), lambda: None),
        Contender(OUR_LOAD, lambda: load(state, storage_reader=StoreReader(store, "bench@1")), lambda: None),
    ]
    found |= alternate(loads, rounds=rounds, tell=print)
    blocked: dict[str, list[float]] = {PLAIN_ASYNC: [], OUR_ASYNC: []}
    for _ in range(rounds):
        cleared()
        blocked[PLAIN_ASYNC].append(_blocked(lambda: async_save(state, checkpoint_id=plain), lambda: None))
        writer = StoreWriter(store, run="bench", step=1)
        begin = partial(async_save, state, storage_writer=writer)
        blocked[OUR_ASYNC].append(_blocked(begin, writer.synchronize_staging))
    seconds = {name: median_seconds(timings) for name, timings in found.items()}
    seconds |= {name: median(each) for name, each in blocked.items()}
    lines = tuple(
        (name, f"{took:.2f} s", *(_beside(found[name]) if name in found else ("", "")))
        for name, took in seconds.items()
    )
    print("\n".join(Table(title=f"{gb:g} GB", header=("", "median", "processor", "memory"), lines=lines).text()))
    for ours, theirs, most in (
        (OUR_SAVE, PLAIN_SAVE, 1.1),
        (OUR_LOAD, PLAIN_LOAD, 1.1),
        (OUR_ASYNC, PLAIN_ASYNC, 1 / 3),
    ):
        print(Bar(what=f"{ours} / {theirs}", value=seconds[ours] / seconds[theirs], most=round(most, 2)).text())


def _state(gb: float) -> dict[str, Any]:
    """Return masters and moments of *gb* GB together, all different."""
    rows = int(gb * 1e9 / _BYTES_OF_A_PARAMETER / _LAYERS / 1024)
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{number}.weight" for number in range(_LAYERS)]

    def tensors() -> dict[str, torch.Tensor]:
        return {name: torch.rand(rows, 1024, generator=generator) for name in names}

    model, mean, square = tensors(), tensors(), tensors()
    moments = {name: {"exp_avg": mean[name], "exp_avg_sq": square[name], "step": torch.tensor(1.0)} for name in names}
    return {"model": model, "optim": {"state": moments, "param_groups": [{"lr": 1e-3, "params": names}]}}


def _blocked(begin: Callable[[], Any], wait: Callable[[], None]) -> float:
    """Return what an asynchronous save that *begin* starts keeps from training, until it need not *wait* any more."""
    matrix = torch.rand(1024, 1024)
    started = time.perf_counter()
    saving = begin()
    blocked = time.perf_counter() - started
    for _ in range(_COMPUTED):
        matrix = matrix @ matrix / 512
    started = time.perf_counter()
    wait()
    blocked += time.perf_counter() - started
    saving.result()
    return blocked


def _beside(timings: Any) -> tuple[str, str]:
    return (
        f"{median(timing.cpu_seconds for timing in timings):.2f} s",
        f"{max(timing.anonymous_bytes for timing in timings) / 1e6:.0f} MB",
    )
