"""Attach and resume on one device, without a process group: what is saved, when, and what a saver's options do."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import layerstore
from layerstore import Keep, Store
from layerstore.errors import Conflict, InvalidInput, NotFound, StorageIO
from layerstore.live.resuming import Resumed
from layerstore.live.saver import Saver, background
from tests.live.module.alone import new, raw, slow_copies
from tests.live.module.models import Optimizers, as_reader_loads, everything, other, train


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a new store."""
    layerstore.init(tmp_path / "store").close()
    return tmp_path / "store"


def resumed(
    store: Path, *, kind: str = "adamw", run: str = "sft", **options: Any
) -> tuple[nn.Module, Optimizers, Resumed]:
    """Return another model that was filled from *run*."""
    model, optimizers = new(kind, seed=5)
    found = layerstore.resume(model, optimizers, store, run=run, **options)
    assert found is not None
    return model, optimizers, found


def saves(saver: Saver, model: nn.Module, optimizers: Optimizers, steps: range) -> dict[int, Any]:
    """Save before each of *steps* is trained; return the states."""
    states = {}
    for step in steps:
        states[step] = raw(model, optimizers)
        saver.save(step)
        train(model, optimizers, step, step + 1)
    return states


@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "two"])
def test_a_save_holds_the_state_of_its_moment(store: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also what forward changes, before the first update, and whatever the optimizer keeps."""
    model, optimizers = new(kind)
    with slow_copies(monkeypatch), layerstore.attach(model, optimizers, store, run="sft") as saver:
        states = saves(saver, model, optimizers, range(4))
        assert saver.status().errors == ()
    losses = train(model, optimizers, 4, 6)

    for step, state in states.items():
        again, its, _ = resumed(store, kind=kind, step=step)
        assert other(raw(again, its), state) == []
        assert train(again, its, step, 6)[-2:] == losses


def test_other_tensors_of_the_model_may_change_too(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that no optimizer trains is saved as it is at each save."""
    model, _ = new()
    optimizer = torch.optim.AdamW(model.get_submodule("layers.0").parameters(), lr=1e-2)
    with slow_copies(monkeypatch), layerstore.attach(model, optimizer, store, run="sft") as saver:
        states = saves(saver, model, optimizer, range(2))
        with torch.no_grad():
            model.get_parameter("small.weight").add_(1)
        states |= saves(saver, model, optimizer, range(2, 3))

    for step, state in states.items():
        again, _ = new(seed=5)
        its = torch.optim.AdamW(again.get_submodule("layers.0").parameters(), lr=1e-2)
        layerstore.resume(again, its, store, run="sft", step=step)
        assert other(raw(again, its), state) == []


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("policy", ["parity", "filter", "drift"])
def test_a_policy_takes_each_layer_from_its_own_save(store: Path, policy: str, kind: str) -> None:
    """Weights and moments alike; the first save with moments has every layer."""
    model, optimizers = new(kind)
    with layerstore.attach(model, optimizers, store, run="sft", policy=policy) as saver:
        states = saves(saver, model, optimizers, range(6))

    again, its, found = resumed(store, kind=kind)
    assert found.step == 5
    assert len(set(found.layers.values())) > 1
    layers = names_by_layer(store)
    for name, value in raw(again, its)["model"].items():
        layer = next(layer for layer, names in layers.items() if name in names)
        expected = states[found.layers[layer]]["model"][name]
        assert torch.equal(value, expected), name
    assert train(again, its, 6, 8)


@pytest.mark.full
def test_a_layer_is_due_once_the_optimizer_keeps_more_of_it(store: Path) -> None:
    """A parameter's first gradient may come late, as an expert's; what was saved before has no moments of it."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft", policy="parity") as saver:
        states = saves(saver, model, optimizers, range(3))
        for step in (3, 4, 5):
            model.get_parameter("unused").grad = torch.ones(7)
            train(model, optimizers, step, step + 1)
            states[step + 1] = raw(model, optimizers)
            saver.save(step + 1)

    for step in states:
        again, its, _ = resumed(store, step=step)
        assert train(again, its, 7, 8)


def names_by_layer(store: Path) -> dict[str, set[str]]:
    """Return what each layer of the newest commit is made of."""
    with Store(store) as opened:
        entries = opened.compose("sft").composition.base.layers
        versions = {entry.layer: opened.repo.version_of(entry) for entry in entries}
    return {
        layer: {name for of in version.parameters for name in (of.name, *of.aliases)}
        for layer, version in versions.items()
    }


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["moments8", "delta8", "delta4"])
def test_a_precision_keeps_exact_versions_in_between(store: Path, precision: Any) -> None:
    """Every Nth is exact, bit for bit; the others are near; a second saver goes on with the differences."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft", precision=precision, exact_every=3) as saver:
        states = saves(saver, model, optimizers, range(1, 6))
    with layerstore.attach(model, optimizers, store, run="sft", precision=precision, exact_every=3) as saver:
        states |= saves(saver, model, optimizers, range(6, 8))

    with Store(store) as opened:
        kept = {entry.step: entry.precision for entry in opened.log("sft")}
    exact = [step for step, name in kept.items() if name == "exact"]
    assert sorted(exact) == [1, 4, 7]
    for step in exact:
        again, its, _ = resumed(store, step=step)
        assert other(raw(again, its), states[step]) == []
    again, its, _ = resumed(store, step=6)
    for name, value in raw(again, its)["model"].items():
        assert torch.allclose(value.float(), states[6]["model"][name].float(), atol=2e-2), name


@pytest.mark.full
def test_retention_names_and_measures_are_those_of_any_saver(store: Path, tmp_path: Path) -> None:
    """Keep, pin, metrics, files and the user's state; what is shown says what was saved."""
    model, optimizers = new()
    (tmp_path / "config.json").write_text("{}")
    with layerstore.attach(model, optimizers, store, run="sft", keep=Keep(last=2)) as saver:
        for step in range(1, 6):
            train(model, optimizers, step - 1, step)
            saver.save(
                client_state={"epoch": step, "order": torch.arange(step)},
                metrics={"loss": 0.5 * step},
                pin="best" if step == 2 else None,
                extra_files={"config.json": tmp_path / "config.json"},
            )
        saver.wait()
        assert saver.status().newest_step == 5
        assert saver.status().errors == ()

    with Store(store) as opened:
        assert [entry.step for entry in opened.log("sft")] == [5, 4, 2]
        assert [entry.pins for entry in opened.log("sft")] == [(), (), ("best",)]
        assert [entry.metrics for entry in opened.log("sft", metrics=True)] == [
            {"loss": 2.5},
            {"loss": 2.0},
            {"loss": 1.0},
        ]
        assert opened.verify(read_data=True).ok
    _, _, found = resumed(store)
    assert found.client_state["epoch"] == 5
    assert found.client_state["metrics"] == {"loss": 2.5}
    assert torch.equal(found.client_state["order"], torch.arange(5))
    assert found.global_steps == 5


def test_frozen_weights_may_be_left_out(store: Path) -> None:
    """They stay as the program has made them."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft", frozen="exclude") as saver:
        states = saves(saver, model, optimizers, range(1, 3))

    again, its = new(seed=5)
    own = {name: value.clone() for name, value in again.state_dict().items() if ".norm." in name}
    layerstore.resume(again, its, store, run="sft")
    assert other(raw(again, its), states[2] | {"model": states[2]["model"] | own}) == []


def test_frozen_weights_are_written_once(store: Path) -> None:
    """A second save has nothing of them to write."""
    model, _ = new()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    with layerstore.attach(model, optimizer, store, run="sft") as saver:
        saves(saver, model, optimizer, range(1, 3))

    with Store(store) as opened:
        later, first = [entry.bytes_new for entry in opened.log("sft")]
    assert later < first / 2


def test_a_synchronous_save_is_there_when_it_returns(store: Path) -> None:
    """The commit is visible at once."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft", mode="sync") as saver, Store(store) as opened:
        saver.save(1)
        assert [entry.step for entry in opened.log("sft")] == [1]


def test_the_generators_go_on_where_they_were(store: Path) -> None:
    """Python's, numpy's and torch's."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saver.save(1)
    expected = random.random(), float(np.random.rand()), torch.rand(3).tolist()

    _, _, found = resumed(store)

    assert found.random_state_restored
    assert (random.random(), float(np.random.rand()), torch.rand(3).tolist()) == expected


@pytest.mark.full
def test_steps_are_counted_by_updates(store: Path) -> None:
    """From the commit that was resumed on, through the end of a saver, also between two of them."""
    model, optimizers = new()
    train(model, optimizers, 0, 2)
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        assert saver.save().step == 2
        train(model, optimizers, 2, 4)
        assert saver.save().step == 4
    train(model, optimizers, 4, 5)
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        assert saver.save().step == 5

    again, its, _ = resumed(store, step=4)
    train(again, its, 4, 6)
    with layerstore.attach(again, its, store, run="sft") as saver:
        assert saver.save().step == 6


def test_a_second_saver_goes_on_and_an_older_step_begins_an_attempt(store: Path) -> None:
    """As with any engine."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft", policy="parity") as saver:
        states = saves(saver, model, optimizers, range(1, 4))
    with layerstore.attach(model, optimizers, store, run="sft", policy="parity") as saver:
        half = saver.save(4)
        assert 0 < len(half.layers_due) < 6
        found = layerstore.resume(model, optimizers, store, run="sft", step=2)
        assert found is not None
        assert saver.save(3).step == 3
    with layerstore.attach(model, optimizers, store, run="sft"):
        pass

    with Store(store) as opened:
        entries = [(entry.attempt, entry.step) for entry in opened.log("sft")]
    assert sorted(entries) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 3)]
    assert set(states) == {1, 2, 3}


@pytest.mark.full
def test_what_was_dropped_comes_back_as_a_branch(store: Path) -> None:
    """Below the commit that both go on from, and of the same steps: a resume after a drop opens an attempt."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saves(saver, model, optimizers, range(3))
    with layerstore.open(store) as opened:
        opened.drop_commits(["sft@1", "sft@2"])
    model, optimizers, _ = resumed(store)
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saves(saver, model, optimizers, range(1, 4))

    with layerstore.open(store) as opened:
        opened.undrop_commits(runs=["sft"])
        lines = opened.log_page("sft", graph=True).lines
    drawn = [(line.drawing, line.entry and (line.entry.attempt, line.entry.step)) for line in lines]
    assert drawn == [
        *(("*", (2, step)) for step in (3, 2, 1)),
        *(("| *", (1, step)) for step in (2, 1)),
        ("|/", None),
        ("*", (1, 0)),
    ]


def test_gradients_that_an_update_has_used_do_not_matter(store: Path) -> None:
    """Programs that clear them only before the next backward pass save and resume all the same."""
    model, optimizer = new()
    assert isinstance(optimizer, torch.optim.Optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.zeros(4, 8, dtype=torch.long)).backward()
        optimizer.step()

    with layerstore.attach(model, optimizer, store, run="sft") as saver:
        step()
        saver.save()
        step()
        saver.save()
        assert layerstore.resume(model, optimizer, store, run="sft", step=1) is not None
        step()
        assert saver.save().step == 2


def test_a_save_after_an_evaluation_is_one_like_any_other(store: Path) -> None:
    """Forward without backward leaves nothing behind."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        states = saves(saver, model, optimizers, range(1, 2))
        model.eval()
        with torch.no_grad():
            model(torch.zeros(4, 8, dtype=torch.long))
        states |= saves(saver, model, optimizers, range(2, 3))

    again, its, _ = resumed(store)
    assert other(raw(again, its), states[2]) == []


def test_two_savers_at_once_are_refused(store: Path) -> None:
    """The first one is named."""
    model, optimizers = new()
    with (
        layerstore.attach(model, optimizers, store, run="sft"),
        pytest.raises(Conflict, match="'sft' is attached already"),
    ):
        layerstore.attach(model, optimizers, store, run="other")


def test_a_saver_that_cannot_start_leaves_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread and no session: training goes on as if nobody had attached, and may attach again."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saves(saver, model, optimizers, range(1))
    before = set(threading.enumerate())

    def unreadable(*_: object, **__: object) -> None:
        raise StorageIO("the disk does not answer", errno=errno.EIO, filename="objects")

    with monkeypatch.context() as patched:
        patched.setattr(background, "referable", unreadable)
        with pytest.raises(StorageIO, match="the disk does not answer"):
            layerstore.attach(model, optimizers, store, run="sft", precision="delta8", keep=Keep(last=1))

    assert set(threading.enumerate()) <= before
    assert list((store / "parts").iterdir()) == []
    layerstore.attach(model, optimizers, store, run="sft").close()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reader_loads_it_too(store: Path) -> None:
    """Under the keys of `get_state_dict`."""
    model, optimizers = new()
    train(model, optimizers, 0, 2)
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saver.save()
    state = everything(model, optimizers)

    assert other(as_reader_loads(store, "sft", state), state) == []


@pytest.mark.full
def test_a_launch_without_resume_is_noticed_and_mended(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It begins an attempt, which is resumed from then on; the one that got further is named, and can be resumed."""
    model, optimizers = new("adamw")
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        states = saves(saver, model, optimizers, range(1, 5))
    model, optimizers = new("adamw", seed=7)
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saves(saver, model, optimizers, range(1, 3))

    caplog.clear()
    assert resumed(store)[2].step == 2
    assert "attempt 1 reached step 4: resume(…, run='sft~1') continues it" in caplog.text
    with pytest.raises(NotFound, match="belongs to an earlier attempt") as caught:
        resumed(store, step=4)
    assert 'use resume(…, run="sft~1")' in str(caught.value.hint)
    with pytest.raises(InvalidInput, match="is not a run but a reference") as wrong:
        resumed(store, run="sft~1@3")
    assert 'run="sft~1", step=3' in str(wrong.value.hint)

    caplog.clear()
    assert resumed(store, run="sft~1", step=3)[2].step == 3
    model, optimizers, found = resumed(store, run="sft~1")
    assert (found.run, found.step) == ("sft", 4)
    weights = states[4]["model"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert "reached step" not in caplog.text
    with layerstore.attach(model, optimizers, store, run="sft") as saver:
        saver.save(5)
    assert resumed(store)[2].step == 5
    assert "reached step" not in caplog.text
