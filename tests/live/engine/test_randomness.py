"""The generators of a process are kept in its rank's file, and set again from it."""

import random
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch

from layerstore.errors import LayerstoreError
from layerstore.live.engine.inert import Memory
from layerstore.live.engine.randomness import random_state, read_random_state, set_random_state
from layerstore.states import RankState, SourceFile, TreeFile


@pytest.fixture(autouse=True)
def _own_generators() -> Iterator[None]:
    """Leave the process's generators as they were."""
    python, legacy, cpu = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(legacy)
    torch.random.set_rng_state(cpu)


def drawn() -> list[float]:
    """Return a number of every generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def kept(*, rank: int = 0, world_size: int = 2) -> tuple[str, bytes]:
    """Return the file that a rank would keep now: its name and what it holds."""
    memory = Memory("memory")
    file = random_state(memory, rank=rank, world_size=world_size)
    data: bytes = memory.bytes_of(file.place).numpy().tobytes()
    return file.name, data


def state_with(*files: tuple[str, bytes]) -> RankState:
    """Return a rank's state with *files*."""
    tree = TreeFile(path="model", tree={})
    return RankState(
        rank=0,
        model=tree,
        optimizer=tree,
        files=tuple(SourceFile(path=name, executable=False, content=data) for name, data in files),
        gathered=(),
    )


def content(data: Any) -> bytes:
    """Return what a file holds that is kept in the state itself."""
    assert isinstance(data, bytes)
    return data


def test_what_is_drawn_next_is_drawn_again() -> None:
    """Python's, numpy's and torch's generators continue from the saved state."""
    state = state_with(("trainer_state.json", b"{}"), kept(rank=1))
    expected = [drawn() for _ in range(3)]

    found = read_random_state(state, content, rank=1)
    assert found is not None
    assert [drawn() for _ in range(3)] != expected  # reading alone sets nothing
    set_random_state(found)

    assert [drawn() for _ in range(3)] == expected


def test_the_file_is_the_trainers_own() -> None:
    """It has the name that the Trainer looks for at one rank or several, and what ``torch.load`` gives it."""
    name, data = kept(rank=3, world_size=8)
    assert name == "rng_state_3.pth"
    assert kept(rank=0, world_size=1)[0] == "rng_state.pth"

    states = torch.load(BytesIO(data), weights_only=False)

    assert {"python", "numpy", "cpu"} <= states.keys()
    assert states["python"] == random.getstate()
    assert states["cpu"].equal(torch.random.get_rng_state())


@pytest.mark.parametrize("files", [(), (("random_states_0.pkl", b"Accelerate's"),), (("trainer_state.json", b"{}"),)])
def test_without_a_state_of_ours_there_is_none(files: tuple[tuple[str, bytes], ...]) -> None:
    """Accelerate's own file is left to Accelerate."""
    assert read_random_state(state_with(*files), content, rank=0) is None


def test_a_state_of_another_device_is_told() -> None:
    """A generator without a saved state continues as it was, and the result says so."""
    found = read_random_state(state_with(kept()), content, rank=0)
    assert found is not None
    is_cuda = torch.cuda.is_available()

    assert set_random_state(found)
    if is_cuda:
        del found["cuda"]
    else:
        found["cuda"] = torch.zeros(16, dtype=torch.uint8)
    assert not set_random_state(found)


def test_a_damaged_file_sets_nothing() -> None:
    """The file is read as a whole before any generator is set."""
    name, data = kept()
    before = random.getstate()

    with pytest.raises(LayerstoreError):
        read_random_state(state_with((name, data[: len(data) // 2])), content, rank=0)

    assert random.getstate() == before
