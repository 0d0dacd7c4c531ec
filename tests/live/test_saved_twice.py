"""What a saver keeps of a running engine is bit for bit what the engine's own checkpoint holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import layerstore
from layerstore.model import CommitRecord, Kind
from layerstore.store import Store
from tests.forked import Nursery
from tests.live.plain import states_of
from tests.live.saved_twice import CHANGED_AT, DRIFT, DRIFT_RUN, DRIFT_STEPS, EXCLUDED_RUN, LAST, RUN, STEPS

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def saved(ranks: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, Path]]:
    """Return the store that the training saved to, and the folder of DeepSpeed's own checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    with ranks.launch("tests.live.saved_twice:run", {"out": str(folder)}, folder=folder, name="saved") as launch:
        launch.done()
    with layerstore.open(folder / "store") as store:
        yield store, folder / "deepspeed"


def test_gathered_parameters_are_saved_as_deepspeed_saves_them(saved: tuple[Store, Path]) -> None:
    """Versions of layers and states of ranks are the same, though a save gathers and partitions nothing."""
    store, checkpoints = saved
    for step in STEPS:
        store.ingest(checkpoints, tag=f"global_step{step}", run="ingested")
        live, ingested = record(store, RUN, step), record(store, "ingested", step)
        assert [entry.version for entry in live.layers] == [entry.version for entry in ingested.layers]
        assert [entry.optimizer_step for entry in live.layers] == [entry.optimizer_step for entry in ingested.layers]
        assert states_of(store, live) == states_of(store, ingested)


def test_frozen_weights_that_were_changed_by_hand_are_written_again(saved: tuple[Store, Path]) -> None:
    """Those that were not are the same objects at all steps."""
    store, _ = saved
    found = [{entry.layer: entry.version.id for entry in record(store, RUN, step).layers} for step in STEPS]
    norms = [versions["model.norm"] for versions in found]
    assert norms[: CHANGED_AT - 1] == norms[:1] * (CHANGED_AT - 1)
    assert norms[CHANGED_AT - 2] != norms[CHANGED_AT - 1]
    assert norms[CHANGED_AT:] == norms[-1:] * (len(STEPS) - CHANGED_AT)
    assert len({versions["model.layers.0"] for versions in found}) == 1


def test_the_engines_own_save_leaves_frozen_weights_out_too(saved: tuple[Store, Path]) -> None:
    """What the saver is told goes for save_checkpoint as well, as if that had been told to exclude them."""
    store, checkpoints = saved
    store.ingest(checkpoints.parent / EXCLUDED_RUN, run="ingested-excluded")

    live, ingested = (record(store, run, LAST) for run in (EXCLUDED_RUN, "ingested-excluded"))

    assert [(entry.layer, entry.version) for entry in live.layers] == [
        (entry.layer, entry.version) for entry in ingested.layers
    ]
    assert states_of(store, live) == states_of(store, ingested)
    kinds = {stored.kind for entry in live.layers for stored in store.repo.version_of(entry).objects}
    assert kinds == {Kind.MASTER, Kind.OPTIMIZER, Kind.BUFFERS}
    assert "model.norm" not in {entry.layer for entry in live.layers}


def test_drift_decides_as_over_deepspeeds_own_checkpoints(saved: tuple[Store, Path]) -> None:
    """What was due, and how far every layer had moved, stands in the records; after a resume all are due."""
    store, checkpoints = saved
    for step in DRIFT_STEPS:
        store.ingest(checkpoints, tag=f"global_step{step}", run="ingested-drift", policy=DRIFT)
        records = [record(store, run, step) for run in (DRIFT_RUN, "ingested-drift")]
        live, ingested = (dict(of.policy.decisions) for of in records)
        due, moved = live["due"], live.get("movements", {})
        assert isinstance(due, list)
        assert isinstance(moved, dict)
        assert [of.policy.parameters for of in records] == [DRIFT.parameters] * 2
        assert due == ingested["due"]
        assert moved == pytest.approx(ingested.get("movements", {}), rel=1e-6)
        if step > DRIFT_STEPS[0]:
            assert {*moved, "seen"} == {entry.layer for entry in records[0].layers}  # a buffer has no masters
            assert (moved["model.layers.0"], moved["model.norm"]) == (0, 0)
            assert "seen" in due
            assert 1 < len(due) < len(moved)
    resumed = record(store, DRIFT_RUN, LAST)
    assert resumed.policy.decisions["due"] == [entry.layer for entry in resumed.layers]


def record(store: Store, run: str, step: int) -> CommitRecord:
    """Return the record of the commit of *run* at *step*."""
    names = [name for name in store.repo.records.names(run) if name.step == step]
    return store.repo.catalog.commit(names[0]).record
