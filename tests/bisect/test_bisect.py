"""A bisection of real stores by real commands: what it finds, how it goes on, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import layerstore
from layerstore import Keep, Store
from layerstore.bisect import Judged, Trial, TrialVerdict, command_judge
from layerstore.errors import AlreadyExists, Conflict, InvalidInput, Locked
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
    """Return the weights of a trial."""
    return load_file(folder / "model.safetensors")


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
    """In few trials; nothing of them is left but the log."""
    before, told = snapshot(store), list[Trial]()
    found = store.bisect(
        "sft@1",
        "sft@8",
        bad_with(store, {"model.layers.3": 6}),
        name="judge",
        folder=tmp_path / "b",
        on_trial=told.append,
    )

    assert (found.good, found.bad, found.layers) == ("sft@5", "sft@6", ("model.layers.3",))
    assert str(found) == "bad since sft@6; model.layers.3 alone suffices"
    assert len(found.trials) <= 3 + 4 + 2
    assert told == list(found.trials)
    assert {path.name for path in (tmp_path / "b").iterdir()} == {"log.jsonl", "lock"}
    assert snapshot(store) == before


def test_layers_that_act_only_together_are_found(store: Store, tmp_path: Path) -> None:
    """By delta debugging."""
    judge = bad_with(store, {"model.layers.1": 4, "model.layers.4": 4})
    found = store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b")

    assert found.layers == ("model.layers.1", "model.layers.4")
    assert str(found) == "bad since sft@4; model.layers.1 and model.layers.4 suffice together"


def test_an_interrupted_bisection_goes_on(store: Store, tmp_path: Path) -> None:
    """No trial is made twice, whenever it was interrupted; another bisection gets its folder only once it has ended."""
    judge, calls = bad_with(store, {"model.layers.0": 3}), list[Path]()
    whole = store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "whole")

    def fragile(folder: Path) -> Judged:
        calls.append(folder)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        return judge(folder)

    for _ in whole.trials[:-1]:
        with pytest.raises(KeyboardInterrupt):
            store.bisect("sft@1", "sft@8", fragile, name="judge", folder=tmp_path / "b")
    with pytest.raises(AlreadyExists, match="holds another bisection, which has not ended"):
        store.bisect("sft@2", "sft@8", judge, name="judge", folder=tmp_path / "b")
    found = store.bisect("sft@1", "sft@8", fragile, name="judge", folder=tmp_path / "b")

    assert [trial.key for trial in found.trials] == [trial.key for trial in whole.trials]
    assert str(found) == str(whole)
    assert store.bisect("sft@2", "sft@8", judge, name="judge", folder=tmp_path / "b").trials[0].number == 1
    mistyped = command_judge(["pyton", "{}"], metric=None, threshold=None, on_output=print)
    with pytest.raises(InvalidInput, match="pyton: No such file"):  # nothing was judged, so nothing is lost
        store.bisect("sft@1", "sft@8", mistyped, name="pyton", folder=tmp_path / "c")
    assert store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "c").trials
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("")
    with pytest.raises(AlreadyExists, match="holds no bisection"):
        store.bisect("sft@2", "sft@8", judge, name="judge", folder=tmp_path / "other")


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
        store.bisect(good, bad, lambda _: Judged(verdict="good"), name="judge", folder=tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("always", "says", "asked"),
    [
        ("bad", "sft@1 is said to be good, and the command says bad", ["sft@1"]),
        ("good", "sft@8 is said to be bad, and the command says good", ["sft@1", "sft@5", "sft@7", "sft@8"]),
    ],
)
def test_a_good_that_is_bad_is_told(
    store: Store, tmp_path: Path, always: TrialVerdict, says: str, asked: list[str]
) -> None:
    """In one line; a first that is not good before anything else is asked, and a last that is not bad at the end."""
    told: list[Trial] = []
    with pytest.raises(Conflict, match=says):
        store.bisect(
            "sft@1",
            "sft@8",
            lambda _: Judged(verdict=always),
            name="judge",
            folder=tmp_path / "b",
            on_trial=told.append,
        )
    assert [trial.asked for trial in told] == asked


def test_trials_are_what_an_export_is(store: Store, tmp_path: Path) -> None:
    """The same tensors."""
    wanted = store.compose("sft@8").state_dict()

    def judge(folder: Path) -> Judged:
        found = weights_of(folder)
        steps = {layer["step"] for layer in json.loads((folder / "layerstore.json").read_text())["layers"].values()}
        if steps == {8}:
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        return Judged(verdict="bad" if 8 in steps else "good")

    assert store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b").bad == "sft@8"


def test_after_a_contradiction_all_is_asked_anew(store: Store, tmp_path: Path) -> None:
    """Nothing of it is left, since the judge may have been wrong."""
    with pytest.raises(Conflict):
        store.bisect("sft@1", "sft@8", lambda _: Judged(verdict="bad"), name="judge", folder=tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["lock"]

    judge = bad_with(store, {"model.norm": 2})
    found = store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b")
    assert (found.bad, found.layers) == ("sft@2", ("model.norm",))


def test_what_is_in_no_layer_is_blamed_on_none(store: Store, tmp_path: Path) -> None:
    """Here the judge looks at a file beside the weights, as training wrote another one from a step on."""
    for step in (9, 10, 11):
        folder = checkpoint(tmp_path / "in", step=step, layout="hf", **LAYERS)
        (folder / "tokenizer_config.json").write_text('{"broken": true}' if step > 9 else "{}")
        store.ingest(folder)

    def judge(folder: Path) -> Judged:
        is_bad = "broken" in (folder / "tokenizer_config.json").read_text()
        return Judged(verdict="bad" if is_bad else "good")

    found = store.bisect("sft@9", "sft@11", judge, name="judge", folder=tmp_path / "b")
    assert (found.bad, found.layers) == ("sft@10", ())
    assert str(found) == "bad since sft@10; none of its layers makes sft@9 bad: look at the other files"


def test_a_judge_that_changes_its_folder_changes_no_other_trial(store: Store, tmp_path: Path) -> None:
    """Each is written anew."""
    inner = bad_with(store, {"model.layers.3": 6})

    def judge(folder: Path) -> Judged:
        judged = inner(folder)
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)
            file.write_bytes(b"spoilt")
        return judged

    found = store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b")
    assert (found.bad, found.layers) == ("sft@6", ("model.layers.3",))


def test_saves_whose_moments_are_gone_are_searched_too(store: Store, tmp_path: Path) -> None:
    """An export does not need them."""
    store.gc(Keep(last=8, drop_optimizer_older_than=3), grace_seconds=0)

    found = store.bisect("sft@1", "sft@8", bad_with(store, {"model.layers.2": 5}), name="judge", folder=tmp_path / "b")
    assert (found.bad, found.layers) == ("sft@5", ("model.layers.2",))


def test_what_goes_wrong_slowly_is_found_a_little_later(store: Store, tmp_path: Path) -> None:
    """The first bad save is past the threshold with a little of every layer."""
    steps = {"model.layers.3": {step: float(step >= 5) * (step - 4) for step in STEPS}}
    sums = {
        (layer, float(weights[next(name for name in weights if name.startswith(layer))].sum())): step
        for step in STEPS
        for weights in [store.compose(f"sft@{step}").state_dict()]
        for layer in store.compose("sft").layers
    }

    def judge(folder: Path) -> Judged:
        weights, badness = weights_of(folder), 0.0
        for layer in store.compose("sft").layers:
            step = sums[layer, float(weights[next(name for name in weights if name.startswith(layer))].sum())]
            badness += steps.get(layer, {}).get(step, 0) + (0.01 if step >= 5 else 0)
        return Judged(verdict="bad" if badness > 1.05 else "good")

    found = store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b")
    assert (found.bad, found.layers, found.layers_from) == ("sft@5", ("model.layers.3",), "sft@8")
    assert str(found) == "bad since sft@5; model.layers.3 alone suffices as of sft@8"


def from_step(layers: dict[str, int]) -> Callable[[Path], Judged]:
    """Return a judge to whom a model is bad that has any of these *layers* from a step on."""

    def judge(folder: Path) -> Judged:
        used = json.loads((folder / "layerstore.json").read_text())["layers"]
        is_bad = any(used[layer]["step"] >= step for layer, step in layers.items())
        return Judged(verdict="bad" if is_bad else "good")

    return judge


def test_a_second_fault_soon_after_is_not_blamed(store: Store, tmp_path: Path) -> None:
    """Whichever of the two the later save leads to."""
    for number, (first, second) in enumerate([("model.layers.4", "model.layers.0"), ("model.norm", "model.layers.1")]):
        judge = from_step({first: 5, second: 7})
        found = store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / f"b{number}")
        assert (found.bad, found.layers, found.layers_from) == ("sft@5", (first,), "sft@5")


def test_only_what_the_first_bad_save_changed_is_blamed(tmp_path: Path) -> None:
    """Under a policy a save changes half of the layers; a later one has changed all."""
    with layerstore.init(tmp_path / "halves") as store:
        for step in range(1, 11):
            store.ingest(checkpoint(tmp_path / "in", step=step, **LAYERS), policy="parity")
        judge = from_step({"model.layers.3": 5, "model.layers.0": 6})
        found = store.bisect("sft@1", "sft@10", judge, name="judge", folder=tmp_path / "b")
        before, after = (store.compose(f"sft@{step}").layers for step in (5, 6))

    assert before["model.layers.0"] == after["model.layers.0"]
    assert str(found) == "bad since sft@6; model.layers.3 alone suffices"


def test_one_bisection_at_a_time(store: Store, tmp_path: Path) -> None:
    """A second one in the same folder would take the first one's trial away."""

    def judge(folder: Path) -> Judged:
        with pytest.raises(Locked, match="the bisection in"):
            store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b")
        return Judged(verdict="bad" if "sft@8" in str(folder) else "good")

    with pytest.raises(Conflict):
        store.bisect("sft@1", "sft@8", judge, name="judge", folder=tmp_path / "b")


def test_a_mixture_and_the_stores_own_place_are_refused(store: Store, tmp_path: Path) -> None:
    """A mixture is in no history."""
    store.compose("sft", policy="parity").pin("mixed")
    for good, bad, folder, says in [
        ("mixed", "sft@8", tmp_path / "b", "mixed is a mixture"),
        ("sft@1", "mixed", tmp_path / "b", "mixed is a mixture"),
        ("sft@1", "sft@8", store.path / "b", "is in the store, or holds it"),
    ]:
        with pytest.raises(InvalidInput, match=says):
            store.bisect(good, bad, lambda _: Judged(verdict="good"), name="judge", folder=folder)
    assert not (tmp_path / "b").exists()
