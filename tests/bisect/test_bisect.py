"""A bisection of real stores by real commands: what it finds, how it goes on, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from layerstore import Store
from layerstore.bisect import Judged, Trial
from layerstore.errors import AlreadyExists, Conflict, InvalidInput
from tests.unit.checkpoints import checkpoint, snapshot

STEPS = (1, 2, 3, 4, 5, 6, 7, 8)
LAYERS = {"layers": 6}


@pytest.fixture
def store(store: Store, tmp_path: Path) -> Store:
    """Return a store of eight saves, each with other numbers."""
    for step in STEPS:
        store.ingest(checkpoint(tmp_path / "in", step=step, **LAYERS))
    return store


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a trial, as its index tells."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in set(index["weight_map"].values())}
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def bad_with(store: Store, layers: dict[str, int]) -> Callable[[Path], Judged]:
    """Return a judge to whom a model is bad that has all these *layers* as they are from a step on."""
    marks = {
        layer: [
            weights[next(name for name in weights if name.startswith(layer))].sum()
            for weights in (store.compose(f"sft@{at}").state_dict() for at in STEPS if at >= step)
        ]
        for layer, step in layers.items()
    }

    def judge(folder: Path) -> Judged:
        weights = weights_of(folder)
        sums = {layer: weights[next(name for name in weights if name.startswith(layer))].sum() for layer in layers}
        is_bad = all(any(torch.equal(sums[layer], mark) for mark in marks[layer]) for layer in layers)
        return Judged(verdict="bad" if is_bad else "good")

    return judge


def test_the_step_and_the_layer_are_found(store: Store, tmp_path: Path) -> None:
    """In few trials, each writing only the layers that are new to it; nothing of it is left but the log."""
    before, told = snapshot(store), list[Trial]()
    found = store.bisect(
        "sft@1", "sft@8", bad_with(store, {"model.layers.3": 6}), folder=tmp_path / "b", tell=told.append
    )

    assert (found.good, found.bad, found.layers) == ("sft@5", "sft@6", ("model.layers.3",))
    assert str(found) == "bad since sft@6; model.layers.3 alone suffices"
    assert len(found.trials) <= 3 + 4 + 2
    assert told == list(found.trials)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["log.jsonl"]
    assert snapshot(store) == before
    whole = store.compose("sft@1").plan_export().size_bytes
    assert all(trial.bytes_written < 0.9 * whole for trial in found.trials if "layer" in trial.asked)


def test_layers_that_act_only_together_are_found(store: Store, tmp_path: Path) -> None:
    """By delta debugging."""
    judge = bad_with(store, {"model.layers.1": 4, "model.layers.4": 4})
    found = store.bisect("sft@1", "sft@8", judge, folder=tmp_path / "b")

    assert found.layers == ("model.layers.1", "model.layers.4")
    assert str(found) == "bad since sft@4; model.layers.1 and model.layers.4 suffice together"


def test_an_interrupted_bisection_goes_on(store: Store, tmp_path: Path) -> None:
    """No trial is made twice, whenever it was interrupted; another bisection gets its folder only once it has ended."""
    judge, calls = bad_with(store, {"model.layers.0": 3}), list[Path]()
    whole = store.bisect("sft@1", "sft@8", judge, folder=tmp_path / "whole")

    def fragile(folder: Path) -> Judged:
        calls.append(folder)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return judge(folder)

    for _ in whole.trials[:-1]:
        with pytest.raises(KeyboardInterrupt):
            store.bisect("sft@1", "sft@8", fragile, folder=tmp_path / "b")
    with pytest.raises(AlreadyExists, match="holds another bisection, which has not ended"):
        store.bisect("sft@2", "sft@8", judge, folder=tmp_path / "b")
    found = store.bisect("sft@1", "sft@8", fragile, folder=tmp_path / "b")

    assert [trial.key for trial in found.trials] == [trial.key for trial in whole.trials]
    assert str(found) == str(whole)
    assert store.bisect("sft@2", "sft@8", judge, folder=tmp_path / "b").trials[0].number == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("")
    with pytest.raises(AlreadyExists, match="holds no bisection"):
        store.bisect("sft@2", "sft@8", judge, folder=tmp_path / "other")


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ("sft@8", "sft@1", "sft@8 is not before sft@1 in one history"),
        ("sft@3", "sft@3", "is not before"),
        ("other", "sft@3", "is not before"),
    ],
)
def test_saves_that_are_not_one_history_are_refused(
    store: Store, tmp_path: Path, good: str, bad: str, says: str
) -> None:
    """Before anything is written."""
    store.ingest(checkpoint(tmp_path / "in", step=9, **LAYERS), run="other")
    with pytest.raises(InvalidInput, match=says):
        store.bisect(good, bad, lambda _: Judged(verdict="good"), folder=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("always", "says"),
    [("bad", "sft@1 is said to be good, and the command says bad"), ("good", "sft@8 is said to be bad")],
)
def test_a_good_that_is_bad_is_told(store: Store, tmp_path: Path, always: str, says: str) -> None:
    """In one line."""
    with pytest.raises(Conflict, match=says):
        store.bisect("sft@1", "sft@8", lambda _: Judged(verdict=always), folder=tmp_path / "b")  # type: ignore[arg-type]


def test_trials_are_what_an_export_is(store: Store, tmp_path: Path) -> None:
    """The same tensors, spread over other files."""
    wanted = store.compose("sft@8").state_dict()

    def judge(folder: Path) -> Judged:
        found = weights_of(folder)
        steps = {layer["step"] for layer in json.loads((folder / "layerstore.json").read_text())["layers"].values()}
        if steps == {8}:
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        return Judged(verdict="bad" if 8 in steps else "good")

    assert store.bisect("sft@1", "sft@8", judge, folder=tmp_path / "b").bad == "sft@8"
