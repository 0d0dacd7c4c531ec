"""
The random number generators of one rank: saved as a file with the rank's state, and restored when the rank resumes.

The file has the Trainer's format and name, so that a Trainer, too, can resume from a composed folder.
"""

import random
from collections.abc import Callable
from io import BytesIO
from typing import Any

from layerstore.live.engine.inert import Memory
from layerstore.live.engine.revive import bytes_of, empty, revive
from layerstore.live.scratch import put, scratch
from layerstore.source import open_source
from layerstore.staging import KeptFile
from layerstore.states import RankState
from layerstore.tree import Located, Storage
from layerstore.zero3.pt import read_pt


def random_state(memory: Memory, *, rank: int, world_size: int) -> KeptFile:
    """Return the state of this process's generators as a file; its bytes go to *memory*."""
    import numpy as np
    import torch

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # the legacy generator, which libraries use
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():  # only the current device's: each rank has one device
        states["cuda"] = torch.cuda.random.get_rng_state()
    data = BytesIO()
    torch.save(states, data)
    name = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
    return KeptFile(name=name, executable=False, place=memory.put(name, data.getvalue()), size_bytes=data.tell())


def read_random_state(state: RankState, content_of: Callable[[Any], bytes], *, rank: int) -> dict[str, Any] | None:
    """Return the generators' states of *rank* in *state*; None if none were saved."""
    # Accelerate may have left a file in its own format, which Accelerate loads itself.
    ours = {"rng_state.pth", f"rng_state_{rank}.pth"}
    file = next((file for file in state.files if file.path in ours), None)
    if file is None:
        return None
    with scratch() as folder:
        path = put(folder / file.path, content_of(file.content))
        states: dict[str, Any] = revive(read_pt(path).tree, _fill)
    return states


def _fill(storage: Storage) -> Any:
    made = empty(storage)
    located = storage.content
    assert isinstance(located, Located), "trees that were just read point into their files"
    with open_source(located.path) as source:
        source.read_into(bytes_of(made), located.offset_bytes)
    return made


def set_random_state(states: dict[str, Any]) -> bool:
    """Set this process's generators; return False if only *states* or only this process has CUDA."""
    import numpy as np
    import torch

    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    cuda, is_cuda = states.get("cuda"), torch.cuda.is_available()
    if cuda is not None and is_cuda:
        if isinstance(cuda, list):
            torch.cuda.random.set_rng_state_all(cuda)
        else:
            torch.cuda.random.set_rng_state(cuda)
    return (cuda is not None) == is_cuda
