"""What a saver keeps of a running engine is bit for bit what the engine's own checkpoint holds."""

from pathlib import Path

import pytest

import layerstore
from layerstore.live.ranks import Ranks
from layerstore.model import CommitRecord
from layerstore.store import Store
from tests.live.plain import states_of
from tests.live.saved_twice import RUN, STEPS

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_gathered_parameters_are_saved_as_deepspeed_saves_them(tmp_path: Path) -> None:
    """Versions of layers and states of ranks are the same, though a save gathers and partitions nothing."""
    with Ranks("tests.live.saved_twice", [str(tmp_path)], count=2, folder=ROOT, log=tmp_path / "log") as ranks:
        assert list(ranks.events()) == []

    with layerstore.open(tmp_path / "store") as store:
        for step in range(1, STEPS + 1):
            store.ingest(tmp_path / "deepspeed", tag=f"global_step{step}", run="ingested")
            live, ingested = record(store, RUN, step), record(store, "ingested", step)
            assert [entry.version for entry in live.layers] == [entry.version for entry in ingested.layers]
            assert [entry.optimizer_step for entry in live.layers] == [
                entry.optimizer_step for entry in ingested.layers
            ]
            assert states_of(store, live) == states_of(store, ingested)


def record(store: Store, run: str, step: int) -> CommitRecord:
    """Return the record of the commit of *run* at *step*."""
    names = [name for name in store.rooms.records.names(run) if name.step == step]
    return store.rooms.catalog.commit(names[0]).record
