"""
In the ranks of DeepSpeed's tests: wraps DeepSpeed for the way that the environment names.

The plugin has multiprocessing's fork server import this module, so every rank begins with it, and with torch and
DeepSpeed imported. A line for each checkpoint saved under ZeRO tells the runner that the wrapping took place.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

import layerstore
from layerstore.live.saver.saver import Saver
from layerstore.zero3 import read_pointer
from tests.foreign.plugin import FOLDER, SAVES

WAY = Path(os.environ[FOLDER]).name

ZERO = {1, 2, 3}
"""The stages that are saved."""

_numbers = count(1)
_savers: list[Saver] = []


def from_rank_0(make: Callable[[], str]) -> str:
    """Return what *make* returns on rank 0; raise on every rank where it raises."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except Exception as error:  # noqa: BLE001 the other ranks wait, and have to hear of it
            told[1] = error
    dist.broadcast_object_list(told)
    if told[1] is not None:
        raise told[1]
    return str(told[0])


def new_store() -> str:
    """Make a store of its own for this launch of ranks, or this save; return its path."""
    return str(layerstore.init(Path(tempfile.mkdtemp(dir=os.environ[FOLDER])) / "store").path)


def attached(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Attach a saver to every engine that *initialize* returns under ZeRO."""

    @wraps(initialize)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = initialize(*args, **kwargs)
        if made[0].zero_optimization_stage() in ZERO:
            store = str(_savers[0].store.path) if _savers else from_rank_0(new_store)
            _savers.append(layerstore.attach(made[0], store, run=f"engine-{next(_numbers)}"))
        return made

    return wrapped


def closed(destroy: Callable[..., Any]) -> Callable[..., Any]:
    """Close all savers before *destroy* ends the ranks' group."""

    @wraps(destroy)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        while _savers:
            _savers.pop().close()
        return destroy(*args, **kwargs)

    return wrapped


def seen(save: Callable[..., Any]) -> Callable[..., Any]:
    """Let what *save* has written under ZeRO go the way, and note it."""

    @wraps(save)
    def wrapped(engine: Any, save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        saved = save(engine, save_dir, tag, *args, **kwargs)
        if engine.zero_optimization_stage() in ZERO:
            dist.barrier()
            folder = Path(save_dir) / str(tag or f"global_step{engine.global_steps}")
            from_rank_0(lambda: _gone(folder))
        return saved

    return wrapped


def _gone(folder: Path) -> str:
    """See that the checkpoint in *folder*, which every rank has saved, goes the way; note it."""
    shards = sorted(folder.glob("*_states.pt"))
    assert shards, f"no shards in {folder}"
    are_pointers = {read_pointer(shard) is not None for shard in shards}
    assert are_pointers == {WAY == "drop-in"}, f"{folder} holds pointers: {are_pointers}"
    if WAY == "round-trip":
        _replaced(folder)
    with Path(os.environ[FOLDER], SAVES).open("a") as notes:
        notes.write(f"{folder}\n")
    return str(folder)


def _replaced(folder: Path) -> None:
    """Put in the place of *folder* what a store makes of it."""
    store = layerstore.Store(new_store())
    ingested = store.ingest(folder.parent, tag=folder.name, run="saved")
    composed = store.path.parent / "composed"
    store.compose(f"saved@{ingested.step}").write(composed)
    shutil.rmtree(folder)
    shutil.copytree(composed, folder.parent, dirs_exist_ok=True)


deepspeed.comm.destroy_process_group = closed(deepspeed.comm.destroy_process_group)
DeepSpeedEngine.save_checkpoint = seen(DeepSpeedEngine.save_checkpoint)
if WAY == "drop-in":
    deepspeed.initialize = attached(deepspeed.initialize)
