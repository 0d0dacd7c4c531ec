"""What cannot be saved or resumed is refused in one line, and nothing is written or changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layerstore
from layerstore import Store
from layerstore.errors import InvalidInput, LayerstoreError, LayoutMismatch, NotFound, Unsupported
from tests.forked import Nursery
from tests.live.dcp.states import all_bits
from tests.live.module.alone import new, raw
from tests.live.module.launched import launched
from tests.live.module.models import Every, Optimizers, train


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with two steps of a run."""
    path = tmp_path_factory.mktemp("wrong") / "store"
    model, optimizers = new()
    with layerstore.attach(model, optimizers, path, run="sft") as saver:
        for step in (1, 2):
            train(model, optimizers, step - 1, step)
            saver.save()
    return path


def files_in(store: Path) -> dict[Path, bytes] | None:
    """Return what a store has, but for locks and caches; None if there is none."""
    parts = [store / part for part in ("objects", "commits", "pins", "parts")]
    found = {path: path.read_bytes() for part in parts for path in part.rglob("*") if path.is_file()}
    return found if store.exists() else None


def refused(
    work: Callable[[], object], kind: type[LayerstoreError], words: str, *, store: Path, of: Any = None
) -> None:
    """Make sure that *work* is refused in one line with *words*, and changes neither *store* nor *of*."""
    there = files_in(store)
    bits = all_bits(raw(*of)) if of else {}
    with pytest.raises(kind, match=words) as raised:
        work()
    assert "\n" not in raised.value.message
    assert files_in(store) == there
    assert not of or all_bits(raw(*of)) == bits


def resumed(store: Path, model: nn.Module, optimizers: Optimizers | None = None, **options: Any) -> None:
    """Resume; nothing may change."""
    optimizers = optimizers or torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    layerstore.resume(model, optimizers, store, **{"run": "sft", **options})


def changed(change: Callable[[Every], object]) -> Every:
    """Return a model after *change*."""
    model, _ = new()
    assert isinstance(model, Every)
    change(model)
    return model


MODELS: dict[str, tuple[Callable[[Every], object], str]] = {
    "more": (
        lambda of: of.register_parameter("more", nn.Parameter(torch.ones(2))),
        "'more' is in the model, but not in",
    ),
    "fewer": (lambda of: delattr(of, "small"), "'small.bias' is in sft@2, but not in the model"),
    "buffer": (lambda of: of.register_buffer("more", torch.ones(2)), "'more' is in the model, but not in"),
    "shape": (
        lambda of: setattr(of, "small", nn.Linear(18, 4)),
        "'small.weight' is .3, 18. in sft@2, and .4, 18. in the",
    ),
    "dtype": (lambda of: of.small.to(torch.bfloat16), "'small.weight' is fp32 in sft@2, and torch.bfloat16 in the"),
}


@pytest.mark.parametrize("name", MODELS)
def test_another_model_is_not_filled(store: Path, name: str) -> None:
    """The first thing that differs is named."""
    change, words = MODELS[name]
    model = changed(change)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    refused(lambda: resumed(store, model, optimizer), LayoutMismatch, words, store=store, of=(model, optimizer))


def test_gradients_that_wait_for_an_update_are_not_lost(store: Path) -> None:
    """Neither a resume nor a save takes place in the middle of an accumulation."""
    model, optimizers = new()
    model(torch.zeros(4, 8, dtype=torch.long)).backward()
    words = "gradients are being accumulated for an update that is still to come"
    refused(lambda: resumed(store, model, optimizers), InvalidInput, words, store=store, of=(model, optimizers))

    with layerstore.attach(model, optimizers, store, run="other") as saver:
        refused(saver.save, InvalidInput, words, store=store)


def test_a_step_of_another_run_is_not_found(store: Path) -> None:
    """What is there is said."""
    model, optimizers = new()
    refused(
        lambda: resumed(store, model, optimizers, step=7),
        NotFound,
        "run 'sft' has no step 7",
        store=store,
        of=(model, optimizers),
    )
    refused(
        lambda: resumed(store, model, optimizers, run="other", must_exist=True),
        NotFound,
        "run 'other' has no commit to resume from",
        store=store,
    )


def foreign() -> Optimizers:
    """Return the optimizer of another model."""
    return new(seed=3)[1]


class Rest(nn.Module):
    """A module that is wrapped as FSDP1 wraps it."""


ARGUMENTS: dict[str, tuple[Callable[[], tuple[Any, ...]], type[LayerstoreError], str]] = {
    "foreign": (
        lambda: (new()[0], foreign()),
        InvalidInput,
        "the optimizer trains a parameter that the model does not have",
    ),
    "no-optimizer": (lambda: (new()[0],), InvalidInput, "Every is a module, and no optimizer was given"),
    "no-module": (lambda: (3, new()[1]), InvalidInput, "int is not a module"),
    "no-torch": (lambda: (new()[0], object()), InvalidInput, "object is not an optimizer of torch"),
    "none": (lambda: (new()[0], []), InvalidInput, "there is no optimizer in the list"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_module_comes_with_its_own_optimizer(tmp_path: Path, name: str) -> None:
    """Both for attach and for resume."""
    given, kind, words = ARGUMENTS[name]
    path = tmp_path / "store"
    verbs: tuple[Callable[..., object], ...] = (layerstore.attach, layerstore.resume)
    for verb in verbs:
        refused(lambda verb=verb: verb(*given(), path, run="sft"), kind, words, store=path)  # type: ignore[misc]


def test_a_store_is_named(tmp_path: Path) -> None:
    """Forgetting it is not taken for a store that is an optimizer."""
    model, optimizers = new()
    for verb in (layerstore.attach, layerstore.resume):
        path = tmp_path / "store"
        refused(lambda verb=verb: verb(model, optimizers, run="sft"), InvalidInput, "no store was given", store=path)  # type: ignore[misc]


def test_what_fsdp1_wraps_is_refused(tmp_path: Path) -> None:
    """And what to do instead is said."""
    model, optimizers = new()
    model.add_module("rest", type("FullyShardedDataParallel", (Rest,), {})())
    refused(
        lambda: layerstore.attach(model, optimizers, tmp_path / "store", run="sft"),
        Unsupported,
        "wrapped by FSDP1",
        store=tmp_path / "store",
    )


@pytest.mark.filterwarnings("ignore")
def test_state_that_no_layer_can_hold_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    """Adafactor keeps rows and columns of a matrix: fine for full saves, refused with a policy."""
    model, _ = new()
    optimizer = torch.optim.Adafactor([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    with layerstore.attach(model, optimizer, tmp_path / "store", run="full") as saver:
        train(model, optimizer, 0, 2)
        saver.save()
    expected = all_bits(raw(model, optimizer))
    losses = train(model, optimizer, 2, 4)
    again, _ = new(seed=5)
    its = torch.optim.Adafactor([each for each in again.parameters() if each.requires_grad], lr=1e-2)
    layerstore.resume(again, its, tmp_path / "store", run="full")
    assert all_bits(raw(again, its)) == expected
    assert train(again, its, 2, 4) == losses

    with layerstore.attach(again, its, tmp_path / "store", run="half", policy="parity") as saver:
        refused(saver.save, InvalidInput, "cannot be split by layer", store=tmp_path / "store")


RANKS = {
    "ranks-differ": ("LayoutMismatch", "the ranks have different models"),
    "ranks-differ-resume": ("LayoutMismatch", "in the model, but not in sft@1"),
    "other-runs": ("InvalidInput", "the ranks have different settings"),
    "step": ("NotFound", "run 'sft' has no step 9"),
    "rows": ("Unsupported", "the optimizer keeps 'rows' of embed.weight, which is not split as the parameter is"),
    "partial": ("Unsupported", "layers.0.sums has partial sums on each rank"),
    "drift": ("Unsupported", "policy drift cannot measure the movement of layers that tensor parallelism has split"),
}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_ranks_refuse_what_one_of_them_does(ranks: Nursery, tmp_path: Path, count: int) -> None:
    """In one line each, and nothing is written."""
    launch = launched(ranks, tmp_path, "refused", count=count, tensor=count == 4)

    for name, (kind, words) in RANKS.items():
        if name == "drift" and count == 2:
            continue
        found = [event for event in launch.events() if event.get("name") == name]
        assert [(event["kind"], event["error"]) for event in found] == [("raised", kind)] * count, name
        assert any(words in event["message"] for event in found), found
    with Store(tmp_path / "store") as store:
        assert [entry.step for entry in store.log("sft")] == [1]
        assert store.repo.records.runs() == ["sft"]


def test_a_run_that_was_dropped_is_not_taken_for_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume starts from scratch, and says where the commits are."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, tmp_path / "store", run="sft") as saver:
        train(model, optimizers, 0, 1)
        saver.save()
    with layerstore.open(tmp_path / "store") as store:
        store.drop("sft@1")

    assert layerstore.resume(model, optimizers, tmp_path / "store", run="sft") is None
    assert "its commits were dropped: layerstore log sft --dropped lists them, " in caplog.text
