"""Modules as people write them: with odd names, odd memory, state of their own, and parts frozen for a while."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layerstore
from layerstore import Conflict, Keep, LayoutMismatch, Unsupported
from tests.live.module.alone import raw, slow_copies
from tests.live.module.models import other


class Odd(nn.Module):
    """A part is called as optimizers call theirs, buffers lie across, a parameter is a number, and it counts."""

    def __init__(self) -> None:
        """Build the module."""
        super().__init__()
        self.state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("first", torch.arange(12.0).view(3, 4).t())
        self.register_buffer("second", (100 + torch.arange(12.0)).view(3, 4).t())
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        """Return what it keeps besides."""
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take it back."""
        self.count = state["count"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        self.count += 1
        loss: torch.Tensor = (self.head(self.state(inputs)) * self.scale).square().mean()
        return loss


def built(seed: int = 0) -> tuple[Odd, torch.optim.Optimizer]:
    """Return the module and its optimizer."""
    torch.manual_seed(seed)
    model = Odd()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make an update."""
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return where the store will be."""
    return tmp_path / "store"


@pytest.mark.parametrize("policy", ["full", "parity"])
def test_all_of_an_odd_module_comes_back(store: Path, policy: str) -> None:
    """Every bit of it, and what a module keeps besides; layers are those of the model."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="odd", policy=policy) as saver:
        update(model, optimizer)
        saver.save()
    again, its = built(seed=1)

    assert layerstore.resume(again, its, store, run="odd") is not None

    assert other(raw(again, its), raw(model, optimizer)) == []
    assert again.count == 1
    with layerstore.open(store) as opened:
        layers = opened.compose("odd").layers
    assert not [layer for layer in layers if layer.startswith("optim")]


def test_what_is_frozen_for_a_while_is_saved_with_its_moments(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was at the save, though it is trained on before it is copied."""
    model, optimizer = built()
    states: dict[int, Any] = {}
    with (
        slow_copies(monkeypatch),
        layerstore.attach(model, optimizer, store, run="odd", policy="parity") as saver,
    ):
        for step in range(1, 6):
            model.head.requires_grad_(step % 2 == 0)
            update(model, optimizer)
            states[step] = raw(model, optimizer)
            saver.save()
            model.head.requires_grad_(True)

    again, its = built(seed=1)
    for step in (1, 2, 3, 4, 5):
        found = layerstore.resume(again, its, store, run="odd", step=step)
        assert found is not None
        if set(found.layers.values()) == {step}:
            assert other(raw(again, its), states[step]) == []


def test_a_resume_says_what_does_not_carry_over(store: Path) -> None:
    """That layers are of several saves and not kept bit for bit, and moments that no optimizer wants."""
    model, optimizer = built()
    options: dict[str, Any] = {"policy": "parity", "precision": "delta8"}
    with layerstore.attach(model, optimizer, store, run="odd", **options) as saver:
        for _ in range(3):
            update(model, optimizer)
            saver.save()
    again, _ = built(seed=1)
    its = torch.optim.AdamW(again.state.parameters(), lr=1e-2)

    found = layerstore.resume(again, its, store, run="odd")

    assert found is not None
    notes = "; ".join(found.notes)
    for words in ("older than step 3", "not bit for bit", "the moments of 'head.bias' and 1 more are left out"):
        assert words in notes


@pytest.mark.parametrize("is_told", [False, True])
def test_a_change_before_it_was_copied_gives_the_save_up(
    store: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Unless it waited for the copies; the commits hold what was there at their save."""
    model, optimizer = built()
    with slow_copies(monkeypatch), layerstore.attach(model, optimizer, store, run="odd") as saver:
        update(model, optimizer)
        saver.save()
        update(model, optimizer)
        expected = raw(model, optimizer)
        saver.save()
        if is_told:
            saver.copied()
        with torch.no_grad():
            model.head.weight.zero_()
        saver.wait()
        errors = saver.status().errors
    again, its = built(seed=1)
    found = layerstore.resume(again, its, store, run="odd")

    assert found is not None
    if is_told:
        assert errors == ()
        assert other(raw(again, its), expected) == []
    else:
        assert "was changed between save() and the next update" in errors[0]
        assert found.step == 1


def test_a_teacher_that_follows_is_saved_as_it_is_each_time(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has changed, it is read at each save."""
    model, _ = built()
    model.head.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.state.parameters(), lr=1e-2)
    with slow_copies(monkeypatch), layerstore.attach(model, optimizer, store, run="odd") as saver:
        update(model, optimizer)
        saver.save()
        saver.wait()
        for _ in range(2):
            update(model, optimizer)
            with torch.no_grad():
                model.head.weight.mul_(0.5)
            expected = model.head.weight.clone()
            saver.save()
            saver.copied()
            with torch.no_grad():
                model.head.weight.mul_(0.5)
        saver.wait()
        assert saver.status().errors == ()
    again, _ = built(seed=1)
    its = torch.optim.AdamW(again.state.parameters(), lr=1e-2)
    layerstore.resume(again, its, store, run="odd")

    assert torch.equal(again.head.weight, expected)


def test_a_compiled_module_is_the_module(store: Path) -> None:
    """Whether it was compiled before the resume or after."""
    model, optimizer = built()
    with layerstore.attach(torch.compile(model, backend="eager"), optimizer, store, run="odd") as saver:
        update(model, optimizer)
        saver.save()
    again, its = built(seed=1)
    layerstore.resume(again, its, store, run="odd")
    with layerstore.attach(torch.compile(again, backend="eager"), its, store, run="odd") as saver:
        assert saver.attempt == 1


def twice(model: Odd, optimizer: torch.optim.Optimizer) -> Any:
    """Return two optimizers of one parameter."""
    return [optimizer, torch.optim.SGD(model.head.parameters(), lr=1.0)]


@pytest.mark.parametrize(
    ("optimizers", "error", "words"),
    [
        (twice, layerstore.InvalidInput, "two optimizers train 'head.weight'"),
        (lambda *_: [], layerstore.InvalidInput, "there is no optimizer in the list"),
    ],
)
def test_optimizers_that_cannot_be_kept_are_refused(
    store: Path, optimizers: Callable[..., Any], error: type[Exception], words: str
) -> None:
    """Before anything is made."""
    model, optimizer = built()

    with pytest.raises(error, match=words):
        layerstore.attach(model, optimizers(model, optimizer), store, run="odd")
    assert not store.exists()


def test_an_optimizer_of_another_class_is_not_filled(store: Path) -> None:
    """Its settings tell."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="odd") as saver:
        update(model, optimizer)
        saver.save()
    again, _ = built(seed=1)

    with pytest.raises(LayoutMismatch, match="the optimizer has no 'betas', unlike the optimizer of odd@1"):
        layerstore.resume(again, torch.optim.SGD(again.parameters(), lr=0.1), store, run="odd")


def test_a_resume_names_the_settings_that_it_replaces(store: Path) -> None:
    """As torch does; here three groups come to share the weight decay of the one that was saved."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="odd") as saver:
        update(model, optimizer)
        saver.save()
    again, _ = built(seed=1)
    first, second, *others = again.named_parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}]
    groups += [{"params": named, "weight_decay": 0.0} for named in ([second], others)]
    its = torch.optim.AdamW(groups, lr=0.5)

    found = layerstore.resume(again, its, store, run="odd")

    assert found is not None
    said = "weight_decay of param group 1 is 0.01, as saved, not 0.0; likewise in 1 more"
    assert found.notes == (said,)
    assert [group["weight_decay"] for group in its.param_groups] == [0.01, 0.01, 0.01]
    assert its.param_groups[0]["param_names"] == [first[0]]


def test_a_buffer_of_another_shape_than_at_first_is_refused(store: Path) -> None:
    """At the save: every rank counts on the shapes that all have told."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="odd") as saver:
        model.first = torch.zeros(5)
        with pytest.raises((Conflict, layerstore.InvalidInput), match=r"was .* when the saver was attached"):
            saver.save()


def test_a_tensor_of_a_class_of_its_own_is_named(store: Path) -> None:
    """When the saver is attached."""

    class Packed(torch.Tensor):
        """A subclass."""

    model, optimizer = built()
    model.register_buffer("packed", torch.zeros(3).as_subclass(Packed))

    with pytest.raises(Unsupported, match="packed"):
        layerstore.attach(model, optimizer, store, run="odd")


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_a_training_without_fp32_is_kept_exactly_and_says_so_once(
    store: Path, dtype: torch.dtype, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Another precision than exact would change nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with layerstore.attach(model, optimizer, store, run="sft", precision="delta8") as saver:
        for step in range(1, 4):
            model(torch.ones(1, 8, dtype=dtype)).sum().backward()
            optimizer.step()
            saver.save(step)

    said = [line for line in caplog.messages if "is kept exactly" in line]
    assert len(said) == count
    assert all(line.startswith("step 2 is ") for line in said)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"keep": Keep(last=3)}, "Keep(last=3) removes each exact save before the next exact one, as only one in 10"),
        ({"keep": Keep(last=3), "exact_every": None}, "Keep(last=3) removes the first save, the only exact one"),
        ({"keep": Keep(last=3), "exact_every": 3}, ""),
        ({"keep": Keep(last=3, every=100)}, ""),
        ({"keep": Keep(last=3), "precision": "exact"}, ""),
    ],
)
def test_a_saver_that_will_keep_no_exact_save_says_so_at_once(
    store: Path, settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The collection that removes the last one would say so too late."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="sft", **{"precision": "delta8", **settings}):
        pass

    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line[: len(said)] for line in warned] == ([said] if said else [])


def test_a_resume_says_from_where(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of several stores that may have the run."""
    model, optimizer = built()
    update(model, optimizer)
    with layerstore.attach(model, optimizer, store, run="sft") as saver:
        saver.save(1)
    layerstore.resume(*built(1), store, run="sft")

    assert f"loaded sft@1 from {store}" in caplog.messages


def test_a_save_that_failed_is_logged_once(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the thread that wrote it, and not again by the one that commits."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="sft", precision="delta8") as saver:
        update(model, optimizer)
        saver.save(1)
        saver.wait()
        with torch.no_grad():
            model.scale.fill_(float("nan"))
        saver.save(2)
        saver.wait()

    assert len([line for line in caplog.messages if "cannot be kept compactly" in line]) == 1


def test_a_training_whose_store_was_removed_comes_to_its_end(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each failed save is a line, and so is that the next saver knows of none; then there is a new store."""
    model, optimizer = built()
    with layerstore.attach(model, optimizer, store, run="sft") as saver:
        saver.save(1)
        saver.wait()
        shutil.rmtree(store)
        saver.save(2)

    said = "\n".join(record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert said.startswith("step 2 was not saved: ")
    assert f"the last save cannot be read: there is no store at {store}; the next saver begins a new" in said
    with layerstore.attach(model, optimizer, store, run="sft") as saver:
        saver.save(3)
    with layerstore.open(store) as opened:
        assert [entry.step for entry in opened.log()] == [3]
