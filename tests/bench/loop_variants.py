"""
Ways to save a running ZeRO-3 engine, behind one face: what the benchmark of the training loop goes through.

Every way keeps the same state on every rank: its masters with their two moments, 12 bytes a parameter over all ranks,
and the counters, scheduler and buffers that belong to them.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import layerstore
from layerstore.live.saver.saver import Saver

Engine = Any  # deepspeed ships no types

RUN = "bench"


class Way(Protocol):
    """One way to save, for the time of one job."""

    @property
    def durable_seconds(self) -> list[float]:
        """Of every save that is known to be on disk, how long that took; empty where nobody can tell."""

    def save(self) -> None:
        """Save the engine's state: training stands still meanwhile."""

    def blocked_elsewhere(self) -> float:
        """Return how many seconds training has been held so far outside of `save`."""

    def finish(self) -> None:
        """Return once every save is there."""

    def close(self) -> None:
        """Let go of the engine; every rank calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One line of the table."""

    name: str
    begin: Callable[[Engine, Path], Way]
    """Called on every rank with a folder that is its own, and empty."""
    cycle: int = 1
    """How many saves after the first it takes until the same layers come again."""


class Nothing:
    """No checkpoints at all."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.durable_seconds: list[float] = []

    def save(self) -> None:
        """Save nothing."""

    def blocked_elsewhere(self) -> float:
        """Return that nothing is held."""
        return 0.0

    def finish(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Close nothing."""


class DeepSpeed(Nothing):
    """DeepSpeed's own ``engine.save_checkpoint``; it neither syncs its files nor tells when they are on disk."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        super().__init__(engine, folder)
        self._engine = engine
        self._folder = folder

    def save(self) -> None:
        """Save a checkpoint."""
        self._engine.save_checkpoint(str(self._folder), tag=f"global_step{self._engine.global_steps}")


class SyncedDeepSpeed(DeepSpeed):
    """The same, on disk before training goes on, as layerstore's saves are before they show: like against like."""

    def save(self) -> None:
        """Save a checkpoint, and sync it; the ranks share the files among them."""
        import torch.distributed as dist

        super().save()
        dist.barrier()
        files = sorted(path for path in self._folder.rglob("*.pt") if path.is_file())
        for path in files[dist.get_rank() :: dist.get_world_size()]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        dist.barrier()


class Dcp(Nothing):
    """
    ``torch.distributed.checkpoint.async_save``.

    ZeRO-3's flat buffers are no DTensors: each rank saves its own, under keys that no other rank has, so that nothing
    is taken for a copy of something else. The weights in half precision are rounded masters, and left out, as in
    DeepSpeed's checkpoints. Its buffers for staging are kept from save to save, and its file is synced.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(engine, folder)
        self._engine = engine
        self._folder = folder
        self._group = dist.new_group(backend="gloo")  # its thread talks to other ranks while training does
        # Threads and memory for staging both want CUDA: here it copies before it returns.
        self._stager = DefaultStager(StagingOptions(False, False, False, False))
        self._running: Future[Any] | None = None
        self._begun = 0.0

    def save(self) -> None:
        """Wait for the save before, and begin another."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.finish()
        self._begun = time.monotonic()
        found = async_save(
            self._state(),
            checkpoint_id=self._folder / f"step{self._engine.global_steps}",
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(found, Future), "nothing is staged in the background without CUDA"
        self._running = found
        found.add_done_callback(partial(self._note, self._begun))

    def finish(self) -> None:
        """Wait for the save that runs."""
        if self._running is not None:
            self._running.result()
            self._running = None

    def close(self) -> None:
        """Let go of buffers and group."""
        import torch.distributed as dist

        self.finish()
        self._stager.close()
        dist.destroy_process_group(self._group)

    def _note(self, begun: float, _: object) -> None:
        self.durable_seconds.append(time.monotonic() - begun)

    def _state(self) -> dict[str, Any]:
        import torch.distributed as dist

        zero, rank = self._engine.optimizer, dist.get_rank()
        state: dict[str, Any] = {f"rank{rank}.counters": {"global_steps": self._engine.global_steps}}
        for group, flat in enumerate(zero.fp32_partitioned_groups_flat):
            state[f"rank{rank}.group{group}.master"] = flat.detach()
            for name, value in zero.optimizer.state[flat].items():
                state[f"rank{rank}.group{group}.{name}"] = value
        return state


class Layerstore:
    """A saver of this project, on a store of its own."""

    def __init__(self, engine: Engine, folder: Path, *, policy: str, mode: Literal["async", "sync"] = "async") -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            layerstore.init(folder / "store").close()
        dist.barrier()
        self._saver: Saver = layerstore.attach(engine, folder / "store", run=RUN, policy=policy, mode=mode)
        self._within = 0.0

    @property
    def durable_seconds(self) -> list[float]:
        """Of every save until this rank's share was on disk; a commit of all follows within a few hundredths."""
        return [of.durable_seconds for of in self._saver.results if of.durable_seconds is not None]

    def save(self) -> None:
        """Begin a save, in sync mode end it too."""
        started = time.monotonic()
        self._saver.save()
        self._within += time.monotonic() - started

    def blocked_elsewhere(self) -> float:
        """Return what was waited for before updates: the saver counts that with what `save` took."""
        return max(self._saver.status().blocked_seconds - self._within, 0.0)

    def finish(self) -> None:
        """Wait until all is durable, and make sure that nothing was given up."""
        self._saver.wait()
        status = self._saver.status()
        if status.failed:
            raise RuntimeError(f"a save came to nothing: {status.errors}")

    def close(self) -> None:
        """Detach."""
        self._saver.close()


NONE = Variant(name="no checkpoints", begin=Nothing)
DEEPSPEED = Variant(name="engine.save_checkpoint", begin=DeepSpeed)
SYNCED = Variant(name="the same, and synced", begin=SyncedDeepSpeed)
FULL = Variant(name="layerstore, full", begin=partial(Layerstore, policy="latest"))

VARIANTS = (
    NONE,
    DEEPSPEED,
    SYNCED,
    Variant(name="DCP async_save", begin=Dcp),
    FULL,
    Variant(name="layerstore, full, sync", begin=partial(Layerstore, policy="latest", mode="sync")),
    Variant(name="layerstore, parity", begin=partial(Layerstore, policy="parity"), cycle=2),
    Variant(name="layerstore, filter", begin=partial(Layerstore, policy="filter"), cycle=10),
    Variant(name="layerstore, drift", begin=partial(Layerstore, policy="drift"), cycle=10),
)
"""What takes turns; a policy that is added here has its line in every table."""


def folder_bytes(folder: Path) -> int:
    """Return how many bytes the files below *folder* have."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def clear(folder: Path) -> None:
    """Make *folder* empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
