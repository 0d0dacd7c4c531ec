"""Launches of this folder's programs, and the comparison of what savers wrote with DeepSpeed's own checkpoints.

Nothing is kept from one test run to the next: what is launched is the very code under test.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.filenames import RANDOM_STATE
from layerstore.format import encode_blob
from layerstore.history import resolve
from layerstore.model import CommitRecord
from layerstore.policy import Policy
from layerstore.states import RankState
from layerstore.store import Store
from tests.deepspeed.launch import train
from tests.deepspeed.scenarios import WORLD_SIZE
from tests.forked import Event, Launch
from tests.live.cases import Trained

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a launch left behind."""

    root: Path
    world_size: int
    store: layerstore.Store


class Launcher:
    """Starts a program once for each device that there is."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        """Start nothing yet."""
        self._folder = folder
        self._program = program
        self._arguments = arguments
        self.on = cache(self._launch)

    def _launch(self, device: str) -> Launched:
        """Launch the program on *device*; skip where there is none."""
        import torch

        count = torch.cuda.device_count() if device == "cuda" else WORLD_SIZE
        if not count:
            pytest.skip("no CUDA device here: the same launch on the CPU stands for it")
        root, world_size = self._folder / device, min(count, WORLD_SIZE)
        root.mkdir()
        train(
            f"tests.live.{self._program}",
            ["--out", str(root), *self._arguments],
            log=self._folder / f"{device}.log",
            world_size=world_size,
            on_cuda=device == "cuda",
        )
        return Launched(root=root, world_size=world_size, store=layerstore.open(root / "store"))


def seen(launched: Launched, case: Trained, *, rank: int = 0) -> dict[str, Any]:
    """Return what *rank* has seen of *case*; skip where it could not be trained."""
    facts: dict[str, Any] = json.loads(case.facts(launched.root, rank).read_text())
    if facts.get("unavailable"):
        pytest.skip(f"DeepSpeed could not compile its optimizer here: {facts['unavailable'][:100]}")
    return facts


def seen_by_all(launched: Launched, case: Trained) -> list[dict[str, Any]]:
    """Return what each rank has seen of *case*."""
    return [seen(launched, case, rank=rank) for rank in range(launched.world_size)]


def skip_on_one_rank(launched: Launched) -> None:
    """Skip where no two ranks can differ."""
    if launched.world_size == 1:
        pytest.skip("one device: there are no ranks that could differ")


def ingested(launched: Launched, folder: Path, *, run: str, steps: list[int], policy: Policy) -> list[CommitRecord]:
    """Ingest DeepSpeed's checkpoints of *steps* from *folder* as *run*; return the records."""
    for step in steps:
        launched.store.ingest(folder, tag=f"global_step{step}", run=run, policy=policy)
    return records(launched, run, steps)


def records(launched: Launched, run: str, steps: list[int]) -> list[CommitRecord]:
    """Return the records of *run* at *steps*."""
    return [resolve(launched.store.repo, f"{run}@{step}").record for step in steps]


def facts_of(store: Store, record: CommitRecord) -> dict[str, Any]:
    """Return all that a record says, but for the name of its run: equal where two saves hold the same."""
    return {
        "layers": [(of.layer, of.version, of.optimizer_step, of.origin.step) for of in record.layers],
        "states": states_of(store, record),
        "step": record.step,
        "save_number": record.save_number,
        "attempt": record.attempt,
        "fork": record.fork,
        "world_size": record.world_size,
        "layout": asdict(record.layout),
        "policy": asdict(record.policy),
    }


def states_of(store: Store, record: CommitRecord) -> list[bytes]:
    """Return all ranks' states of *record*, but for their random states: DeepSpeed's own checkpoints have none."""
    return [encode_blob(_without_random_state(store.repo.state(ref))) for ref in record.states]


def _without_random_state(state: RankState) -> RankState:
    return replace(state, files=tuple(file for file in state.files if not RANDOM_STATE.fullmatch(file.path)))


# -- what forked ranks have told -------------------------------------------------------------------------------------


def losses(launch: Launch, name: str = "") -> dict[int, str]:
    """Return the losses that *launch* told, by step."""
    return {event["step"]: event["loss"] for event in launch.events("loss") if event["name"] == name}


def due(launch: Launch, name: str = "") -> dict[int, list[str]]:
    """Return the layers that were due at each save of *launch*, on which all ranks agree."""
    found: dict[int, list[str]] = {}
    for event in launch.events("saved"):
        if event["name"] == name:
            assert found.setdefault(event["step"], event["due"]) == event["due"]
    return found


def one(launch: Launch, kind: str, **facts: object) -> Event:
    """Return the event of *kind* that the first rank told with *facts*."""
    wanted = {"rank": 0, **facts}
    (found,) = [event for event in launch.events(kind) if wanted.items() <= event.items()]
    return found
