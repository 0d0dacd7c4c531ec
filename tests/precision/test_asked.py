"""Whoever asks compact saves for more than a composite gets an answer about the numbers that they decode to."""

import json
from pathlib import Path

from layerstore import Store
from layerstore.bisect import Judged
from layerstore.policy import Drift
from tests.precision.twins import record, twins
from tests.unit.checkpoints import Checkpoints, tensors_of


def weights_in(folder: Path) -> dict[str, bytes]:
    """Return every tensor of a folder, however its files are cut."""
    return {name: data for path in folder.glob("*.safetensors") for name, data in tensors_of(path).items()}


def test_a_bisection_judges_what_is_composed_and_each_folder_says_that_it_is_inexact(
    store: Store, tmp_path: Path
) -> None:
    """A judge sees the weights that an export has, and is told where they were not kept bit for bit."""
    saved = Checkpoints(tmp_path / "in", layout="hf")
    for step in (2, 4, 6, 8):
        store.ingest(saved(step), run="r", precision="delta8", exact_every=3)
    exported = store.compose("r@4").export(tmp_path / "out").out
    told: list[bool] = []
    seen: list[dict[str, bytes]] = []

    def judge(folder: Path) -> Judged:
        notes = json.loads((folder / "layerstore.json").read_text())["notes"]
        told.append(any("were kept in 8 bits: these weights are not bit for bit" in note for note in notes))
        seen.append(weights_in(folder))
        return Judged(verdict="good" if len(told) == 1 else "bad")

    found = store.bisect("r@2", "r@8", judge, name="judge", folder=tmp_path / "bisect", steps_only=True)

    assert (found.good, found.bad) == ("r@2", "r@4")
    assert [trial.asked for trial in found.trials] == ["r@2", "r@6", "r@4"]
    assert told == [False, True, True]
    assert seen[-1] == weights_in(exported)


def test_drift_measures_from_what_is_decoded(store: Store, saved: Checkpoints, tmp_path: Path) -> None:
    """As it would from an exact store of the decoded numbers: a layer is as old as what a composite would have."""
    for step in (2, 4):
        store.ingest(saved(step), run="sft", precision="delta8", exact_every=None)
    pair = twins(tmp_path, store, 2, 4)
    with pair.exact as exact:
        found = [each.ingest(saved(6), run="sft", policy=Drift(threshold=1.45)) for each in (store, exact)]
        moved = [record(each, "sft@6").policy.decisions["movements"] for each in (store, exact)]
    assert moved[0] == moved[1]
    assert found[0].layers_saved == found[1].layers_saved
