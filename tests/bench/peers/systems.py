"""
The systems that are compared: how each saves a ZeRO-3 state in its best settings, and loads it again.

Each keeps everything that a resume needs, to the last bit. `System.wait` syncs what a system leaves to the page cache:
the time until a save is durable includes that, the time that it blocks does not.
"""

import importlib.util
import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import layerstore
from layerstore.live.saver.options import SaverKeywords
from layerstore.live.saver.saver import Saver
from tests.bench.peers.state import Engine, State

RUN = "bench"

UNIVERSAL = "universal"
"""The folder beside DeepSpeed's saves for what ``ds_to_universal`` makes of the newest."""


class System:
    """One way to save an engine, into a folder of its own; `save`, `wait` and `load` are called on all ranks."""

    name: ClassVar[str]
    package: ClassVar[str] = ""
    """The optional package that it needs."""
    is_waited_for_beside: ClassVar[bool] = True
    """Whether a thread may wait for a save while training goes on."""
    is_for_any_world: ClassVar[bool] = False
    """Whether other ranks than those that saved can load it."""
    data: ClassVar[str] = "."
    """The part of its folder that holds tensors."""
    saves_mixed: ClassVar[int] = 1
    """From how many of the last saves the layers of what it loads come."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.state = State(engine)
        self.number = max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)

    @classmethod
    def missing(cls) -> str:
        """Say what this machine lacks for it; nothing if it can run."""
        is_there = not cls.package or importlib.util.find_spec(cls.package) is not None
        return "" if is_there else f"not installed: pip install {cls.package}"

    @property
    def latest(self) -> Path:
        """The folder of the newest save."""
        return self.folder / str(self.number)

    def save(self) -> None:
        """Save; training stands still meanwhile."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return once the newest save is on disk; all ranks have returned from `save`."""
        self.sync()

    def load(self) -> None:
        """Fill the engine from the newest save; what raises on one rank must not keep another waiting."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what takes all ranks at once, when each has loaded its part."""

    def close(self) -> None:
        """Let go of the engine."""

    def blocked_elsewhere(self) -> float:
        """Return how many seconds training has been held so far outside of `save`."""
        return 0.0

    def durable_seconds(self) -> float:
        """Return how long the newest save took to be on disk, if nobody can wait for it beside the training."""
        raise NotImplementedError

    def forget_earlier(self) -> None:
        """Remove all saves but the newest, if each has files of its own. One rank calls it."""
        for path in self.folder.iterdir():
            if path.name.isdecimal() and path != self.latest:
                shutil.rmtree(path)

    def sync(self) -> None:
        """Sync this rank's share of the newest save's files, and their folders."""
        import torch.distributed as dist

        paths = sorted(self.latest.rglob("*"))
        for path in [*paths[dist.get_rank() :: dist.get_world_size()], self.latest, self.folder]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def begin(self) -> Path:
        """Make the folder of the next save and return it."""
        self.number += 1
        self.latest.mkdir(parents=True, exist_ok=True)
        return self.latest

    def own(self, name: str) -> Path:
        """Return this rank's file in the newest save."""
        import torch.distributed as dist

        return self.latest / f"{name}-{dist.get_rank()}"


# -- DeepSpeed -----------------------------------------------------------------------------------------------------


class DeepSpeed(System):
    """``engine.save_checkpoint``."""

    name = "DeepSpeed"
    is_for_any_world = True  # once ds_to_universal has converted it

    def save(self) -> None:
        """Save a checkpoint."""
        self.engine.save_checkpoint(str(self.begin()), tag="state")

    def load(self) -> None:
        """Load it; what ``ds_to_universal`` has made of it, where that is beside it."""
        universal = self.folder / "universal"
        self.engine._config.load_universal_checkpoint = universal.exists()  # as its config would
        try:
            folder, tag = (self.folder, "universal") if universal.exists() else (self.latest, "state")
            self.engine.load_checkpoint(str(folder), tag=tag)
        finally:
            self.engine._config.load_universal_checkpoint = False


# -- files of tensors ----------------------------------------------------------------------------------------------


class OfTensors(System):
    """A system that knows tensors and counters, but no engine."""

    rest: dict[str, Any]
    """The counters that were loaded."""

    def finish(self) -> None:
        """Set the counters, and round weights from masters."""
        self.state.fill(self.rest)


class TorchSave(OfTensors):
    """``torch.save``, a file for each rank; read by mapping it."""

    name = "torch.save"

    def save(self) -> None:
        """Write the file."""
        import torch

        self.begin()
        torch.save({"flats": self.state.flats(), "rest": self.state.rest()}, self.own("state"))

    def load(self) -> None:
        """Read it."""
        import torch

        found = torch.load(self.own("state"), mmap=True, weights_only=True)
        for name, flat in self.state.flats().items():
            flat.copy_(found["flats"][name])
        self.rest = found["rest"]


class Safetensors(OfTensors):
    """``safetensors``, a file for each rank, and counters beside it."""

    name = "safetensors"

    def save(self) -> None:
        """Write the files."""
        import torch
        from safetensors.torch import save_file

        self.begin()
        save_file(self.state.flats(), self.own("state"))
        torch.save(self.state.rest(), self.own("rest"))

    def load(self) -> None:
        """Read them."""
        import torch
        from safetensors import safe_open

        with safe_open(self.own("state"), framework="pt") as found:
            for name, flat in self.state.flats().items():
                flat.copy_(found.get_tensor(name))
        self.rest = torch.load(self.own("rest"), weights_only=True)


# -- PyTorch's distributed checkpoints -----------------------------------------------------------------------------


class Distributed(OfTensors):
    """``torch.distributed.checkpoint`` of distributed tensors, two threads a rank, files synced."""

    name = "DCP"
    is_for_any_world = True

    def save(self) -> None:
        """Write a checkpoint."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self._state(), storage_writer=self._writer())

    def load(self) -> None:
        """Read it in place."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, storage_reader=FileSystemReader(self.latest))
        self.rest = state["rest"]

    def _state(self) -> dict[str, Any]:
        return {"state": self.state.distributed(), "rest": self.state.rest()}

    def _writer(self) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(self.begin(), thread_count=2, sync_files=True)


@cache
def _own_group() -> Any:
    """Return a group of all ranks for collectives of a background thread: those of the training have another."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo")


class AsyncDistributed(Distributed):
    """The same in the background, from a copy that is kept: PyTorch's own stagers keep theirs only where CUDA is."""

    name = "DCP, async"

    def __init__(self, engine: Engine, folder: Path) -> None:
        import torch

        super().__init__(engine, folder)
        self._copies = {
            name: torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
            for name, flat in self.state.flats().items()
        }
        self._saving: Any = None

    def save(self) -> None:
        """Copy the state; a thread writes it."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        for name, flat in self.state.flats().items():
            self._copies[name].copy_(flat)
        state = {"state": self.state.distributed(self._copies), "rest": self.state.rest()}
        self._saving = async_save(
            state, storage_writer=self._writer(), async_stager=_Staged(), process_group=_own_group()
        )

    def wait(self) -> None:
        """Wait for the thread."""
        self._saving.result()
        self.sync()


class _Staged:
    """A stager for a state that is a copy already."""

    should_synchronize_after_execute = _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Keep the copy."""


# -- other packages ------------------------------------------------------------------------------------------------


class Torchsnapshot(OfTensors):
    """``torchsnapshot``, in the background."""

    name = "torchsnapshot, async"
    package = "torchsnapshot"

    def save(self) -> None:
        """Copy the state; a thread writes it."""
        from torchsnapshot import Snapshot

        self._saving = Snapshot.async_take(str(self.begin()), self._state(self.state.rest()))

    def wait(self) -> None:
        """Wait for the thread, and sync what it leaves to the page cache."""
        self._saving.wait()
        self.sync()

    def load(self) -> None:
        """Read it in place."""
        from torchsnapshot import Snapshot

        state = self._state({})
        Snapshot(str(self.latest)).restore(state)
        self.rest = state["rest"]["rest"]

    def _state(self, rest: dict[str, Any]) -> dict[str, Any]:
        from torchsnapshot import StateDict

        return {"state": StateDict(**self.state.flats()), "rest": StateDict(rest=rest)}


class Moonclip(OfTensors):
    """``moonclip``, lossless, in the background: a store for each rank, differences to what was saved before."""

    name = "moonclip, async, lossless"
    package = "moonclip"

    def __init__(self, engine: Engine, folder: Path) -> None:
        import torch.distributed as dist
        from moonclip import CheckpointManager

        super().__init__(engine, folder)
        # Keep every save; compress at level 1, its fastest.
        self._manager = CheckpointManager(
            str(folder / f"rank-{dist.get_rank()}"),
            world_size=1,
            rank=0,
            compression_level=1,
            max_full_snapshots=1000,
            max_deltas_per_full=1000,
            save_dtype=None,
        )

    def save(self) -> None:
        """Copy the state; a thread compresses and writes it."""
        self.number += 1
        self._manager.save(self.number, extra={"state": self.state.tensors(), "rest": self.state.rest()})

    def wait(self) -> None:
        """Wait for the thread, which syncs."""
        self._manager.flush()

    def load(self) -> None:
        """Read the newest."""
        _, found = self._manager.load_latest()
        for key, tensor in self.state.tensors().items():
            tensor.copy_(found["extra/state"][key])
        self.rest = found["extra/rest"]

    def forget_earlier(self) -> None:
        """Keep all: saves rest on each other."""


# -- this project --------------------------------------------------------------------------------------------------


class Layerstore(System):
    """A saver of this project: each save is hashed, synced, then visible."""

    name = "layerstore, full"
    data = "store/objects"
    options: ClassVar[SaverKeywords] = {}
    is_waited_for_beside = False
    is_for_any_world = True

    def __init__(self, engine: Engine, folder: Path) -> None:
        import torch.distributed as dist

        super().__init__(engine, folder)
        self._store = folder / "store"
        self._saver: Saver | None = None
        if dist.get_rank() == 0 and not self._store.exists():
            layerstore.init(self._store).close()
        dist.barrier()
        self._within = 0.0

    def save(self) -> None:
        """Begin a save."""
        if self._saver is None:
            self._saver = layerstore.attach(self.engine, self._store, run=RUN, **self.options)
        started = time.monotonic()
        self._saver.save()
        self._within += time.monotonic() - started

    def wait(self) -> None:
        """Wait until it is visible, and make sure that nothing was given up."""
        assert self._saver is not None
        self._saver.wait()
        if self._saver.status().failed:
            raise RuntimeError(f"a save came to nothing: {self._saver.status().errors}")

    def load(self) -> None:
        """Fill the engine, each rank with its own slices."""
        found = layerstore.resume(self.engine, self._store, run=RUN, must_exist=True)
        assert found is not None

    def close(self) -> None:
        """Detach."""
        if self._saver is not None:
            self._saver.close()

    def blocked_elsewhere(self) -> float:
        """Return how long updates have waited for copies: the saver adds that to what `save` took."""
        return 0.0 if self._saver is None else max(self._saver.status().blocked_seconds - self._within, 0.0)

    def durable_seconds(self) -> float:
        """Return how long it took until the commit of all ranks was visible."""
        assert self._saver is not None
        newest = self._saver.store.timings(RUN)[-1]
        assert newest.visible_seconds is not None
        return newest.visible_seconds

    def forget_earlier(self) -> None:
        """Keep all: layers are shared."""


class SyncLayerstore(Layerstore):
    """The same, on disk before training goes on."""

    name = "layerstore, full, sync"
    options: ClassVar[SaverKeywords] = {"mode": "sync"}
    is_for_any_world = False  # its store is that of the asynchronous one


class ParityLayerstore(Layerstore):
    """The same, half of the layers at a time."""

    name = "layerstore, parity"
    options: ClassVar[SaverKeywords] = {"policy": "parity"}
    saves_mixed = 2


SYSTEMS: tuple[type[System], ...] = (
    DeepSpeed,
    TorchSave,
    Safetensors,
    Distributed,
    AsyncDistributed,
    Torchsnapshot,
    Moonclip,
    Layerstore,
    SyncLayerstore,
    ParityLayerstore,
)
"""All systems, in the order of the table."""

_NEEDS_GPU = "needs a GPU: DeepSpeed 0.19.8 has no CPU build of an operator that its writer loads (UtilsBuilder)"
IMPOSSIBLE = {"DeepSpeed, fast writer": _NEEDS_GPU, "DeepSpeed, decoupled": _NEEDS_GPU}
"""What cannot run in a training on CPUs, and why."""
