"""
The random numbers of one rank: kept beside its state, and set again where the same rank goes on.

In the Trainer's own form and under its own name, so that a composed folder serves it as well.
"""

import random
from collections.abc import Callable
from io import BytesIO
from typing import Any

from layerstore.live.inert import Memory
from layerstore.live.revive import bytes_of, empty, revive
from layerstore.live.scratch import put, scratch
from layerstore.model import RankState
from layerstore.publish.shares import KeptFile
from layerstore.tree import Located, Storage
from layerstore.zero3 import RANDOM_STATE, open_source
from layerstore.zero3.pt import read_pt


def random_state(memory: Memory, *, rank: int, world_size: int) -> KeptFile:
    """Return this process's generators as a file of its rank; its bytes go to *memory*."""
    import numpy as np
    import torch

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # the legacy one is what libraries draw from
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    data = BytesIO()
    torch.save(states, data)
    name = "rng_state.pth" if world_size == 1 else f"rng_state_{rank}.pth"
    return KeptFile(name=name, executable=False, place=memory.put(name, data.getvalue()), size_bytes=data.tell())


def read_random_state(state: RankState, content_of: Callable[[Any], bytes]) -> dict[str, Any] | None:
    """Return the generators' states that *state* has; None where it has none."""
    # Accelerate's own form, which may be there as well, is Accelerate's to load.
    ours = (each for each in state.files if each.path.startswith("rng_state"))
    file = next((each for each in ours if RANDOM_STATE.fullmatch(each.path)), None)
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
    """Set this process's generators; False where one of them is not in *states*, or is one of a device not here."""
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
