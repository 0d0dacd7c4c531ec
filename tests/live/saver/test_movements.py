"""How far layers have moved, measured by ranks that run as threads of this process: no engine is launched."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import layerstore
from layerstore import Drift
from layerstore.ingest.selection import RUN_ELEMENTS, RUNS
from layerstore.live.deepspeed.capture import SavedStates, capture
from layerstore.live.engine import Captured
from layerstore.live.saver.movements import MovementWatch
from layerstore.model import Kind
from layerstore.numbers.distance import Movements
from layerstore.policy import Save
from tests.generated import generate
from tests.ranks.exchanges import Together

WIDE: dict[str, Any] = {"layers": 3, "hidden": 52, "vocab": 64, "layout": "raw"}
"""The larger parameters have more elements than are looked at, and many a run of them lies on two of three ranks."""

LAYERS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head")
ALL = frozenset(LAYERS)


class Ranks:
    """Watches of all ranks of a model, and its masters as they are now."""

    def __init__(self, folder: Path, world_size: int = 2, **options: Any) -> None:
        """Begin with the checkpoint of step 1."""
        self._folder, self._world_size, self._options = folder, world_size, WIDE | options
        together = Together(world_size)
        self._watches = [MovementWatch(together.of(rank)) for rank in range(world_size)]
        self.go_to(1)

    def go_to(self, step: int) -> None:
        """Hold what the checkpoint of *step* has."""
        self._captured = [
            captured(files, rank)
            for rank, files in enumerate(files_of(made(self._folder, self._world_size, step, **self._options)))
        ]

    def saved(self, layers: frozenset[str] = ALL) -> None:
        """Save *layers* on every rank."""
        for watch, held in zip(self._watches, self._captured, strict=True):
            watch.saved(watch.sample(held), layers)

    def movements(self) -> Movements:
        """Return what every rank finds: the same."""
        with ThreadPoolExecutor(self._world_size) as pool:
            samples = [watch.sample(held) for watch, held in zip(self._watches, self._captured, strict=True)]
            first, *others = list(pool.map(MovementWatch.movements, self._watches, samples))
        for other in others:
            assert other.relative == pytest.approx(first.relative, nan_ok=True, rel=0, abs=0)
            assert other.weighted == pytest.approx(first.weighted, nan_ok=True, rel=0, abs=0)
        return first

    def change(self, layer: str, change: Callable[[torch.Tensor], object], *, state: str = "") -> None:
        """Do something to each slice of the masters of *layer*, or of a *state* of the optimizer's."""
        for held in self._captured:
            for source in (of for one in held.share.layers if one.layer == layer for of in one.objects):
                for part in (of for of in source.slices if of.state == state):
                    values = held.memory(part.path).bytes_of(part.path).view(torch.float32)
                    change(values[part.offset_bytes // 4 :][: part.elements])


def made(folder: Path, world_size: int, step: int, **options: Any) -> Path:
    """Return the checkpoint of *step* for *world_size* ranks; its numbers do not depend on how many these are."""
    path = folder / f"{world_size}-{step}"
    return path if path.exists() else generate(path, world_size=world_size, step=step, **options)


def files_of(checkpoint: Path) -> list[tuple[Path, Path]]:
    """Return the two files of every rank."""
    optimizers = sorted(checkpoint.rglob("*optim_states.pt"))
    return [(path.parent / path.name.replace("bf16_", "").replace("optim", "model"), path) for path in optimizers]


def captured(files: tuple[Path, Path], rank: int) -> Captured:
    """Return what an engine would hand over that has what is in *files*."""
    model, optimizer = files
    states = SavedStates(
        model=torch.load(model, weights_only=False),
        model_path=model,
        optimizer=torch.load(optimizer, weights_only=False),
        optimizer_path=optimizer,
    )
    return capture(states, rank=rank, folder=model.parent, pattern=None)


def ingested(folder: Path, **options: Any) -> Movements:
    """Return the movements from step 1 to step 2 as the store measures them, from versions that it holds."""
    with layerstore.init(folder / "store") as store:
        store.ingest(made(folder, 2, 1, **WIDE | options), run="r")
        store.ingest(made(folder, 2, 2, **WIDE | options), run="r", policy=Drift())
        found = cast(dict[str, Any], store.compose("r")._composition.base.policy.decisions)
    return Movements(relative=found["movements"], weighted=found["weighted_movements"])


def test_movement_is_the_stores_own_at_any_world_size(tmp_path: Path) -> None:
    """The sample is by place in the whole parameter, and every element of it is looked at by just one rank."""
    expected = ingested(tmp_path)

    assert expected.relative.keys() == expected.weighted.keys() == ALL
    assert expected.weighted != expected.relative
    assert 3 * WIDE["hidden"] ** 2 > RUNS * RUN_ELEMENTS
    for world_size in (1, 2, 3):
        ranks = Ranks(tmp_path, world_size)
        ranks.saved()
        ranks.go_to(2)
        found = ranks.movements()
        assert found.relative == pytest.approx(expected.relative, rel=1e-9)
        assert found.weighted == pytest.approx(expected.weighted, rel=1e-9)


def test_a_sample_is_one_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sub-groups there are: each transfer would wait for all that the device has begun."""
    (files,) = files_of(made(tmp_path, 1, 1, **WIDE))
    held, watch = captured(files, 0), MovementWatch(Together(1).of(0))
    expected = watch.sample(held)
    assert len(watch._masters) == len(watch._squares) > 1
    transfers: list[object] = []
    to = torch.Tensor.to

    def counted(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        transfers.extend(each for each in arguments if each == "cpu")
        return to(tensor, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "to", counted)
    found = watch.sample(held)

    assert len(transfers) == 1
    assert torch.equal(found.masters, expected.masters)
    assert found.squares is not None
    assert expected.squares is not None
    assert torch.equal(found.squares, expected.squares)


def test_only_saved_layers_are_measured_anew(tmp_path: Path) -> None:
    """The others go on from where they were when they were saved."""
    ranks = Ranks(tmp_path)
    ranks.saved()
    for layer in ("model.layers.0", "model.layers.1"):
        ranks.change(layer, lambda values: values.mul_(1.5))
    assert ranks.movements().relative == pytest.approx(dict.fromkeys(ALL, 0.0) | dict.fromkeys(LAYERS[1:3], 0.5))

    ranks.saved(frozenset({"model.layers.0"}))
    for layer in ("model.layers.0", "model.layers.1"):
        ranks.change(layer, lambda values: values.mul_(2))

    found = ranks.movements().relative
    assert found == pytest.approx(dict.fromkeys(ALL, 0.0) | {LAYERS[1]: 1.0, LAYERS[2]: 2.0})


def test_a_parameter_counts_by_its_size(tmp_path: Path) -> None:
    """However few of a large one's elements are looked at: a layer whose norms alone move has hardly moved."""
    ranks = Ranks(tmp_path)
    ranks.saved()
    before, moved = {}, []
    ranks.change("model.layers.1", lambda values: before.update({values.data_ptr(): values.clone()}))
    ranks.change("model.layers.1", lambda values: values.add_(1.0) if len(values) < RUN_ELEMENTS else None)
    ranks.change("model.layers.1", lambda values: moved.append(values - before[values.data_ptr()]))

    found = ranks.movements().relative["model.layers.1"]

    lengths = torch.cat(list(before.values())).norm()
    assert found == pytest.approx(float(torch.cat(moved).norm() / lengths), rel=0.1)


def test_a_movement_counts_as_much_as_its_gradients_are_large(tmp_path: Path) -> None:
    """Of two layers that move alike, the one whose second moments are 16 times as large counts four times as much."""
    ranks = Ranks(tmp_path)
    ranks.saved()
    for layer, square in (("model.layers.0", 1.0), ("model.layers.1", 16.0)):
        ranks.change(layer, lambda values: values.add_(0.25))
        ranks.change(layer, lambda values, square=square: values.fill_(square), state="exp_avg_sq")  # type: ignore[misc]

    found = ranks.movements().weighted

    assert found["model.layers.1"] == pytest.approx(4 * found["model.layers.0"])
    assert {layer for layer, movement in found.items() if movement} == {"model.layers.0", "model.layers.1"}


def test_without_second_moments_only_relative_movement_is_known(tmp_path: Path) -> None:
    """Before the first update, and under an optimizer that keeps none; where they begin, all layers are due."""
    ranks = Ranks(tmp_path)
    whole = ranks._captured
    ranks._captured = [without_moments(held) for held in whole]
    ranks.saved()
    ranks.change("model.layers.1", lambda values: values.mul_(1.5))

    found = ranks.movements()
    ranks._captured = whole
    begun = ranks.movements()

    assert found.relative["model.layers.1"] == pytest.approx(0.5)
    assert found.weighted == {}
    assert begun == Movements()


def without_moments(held: Captured) -> Captured:
    """Return the same without anything of the optimizer's."""
    layers = tuple(
        replace(of, objects=tuple(one for one in of.objects if one.kind != Kind.OPTIMIZER)) for of in held.share.layers
    )
    return replace(held, share=replace(held.share, layers=layers))


@pytest.mark.parametrize("when", ["before", "since"])
def test_a_layer_that_has_gone_wrong_is_due_and_spoils_no_other(tmp_path: Path, when: str) -> None:
    """Its values may have been NaN when it was saved, or since."""
    ranks = Ranks(tmp_path)
    if when == "since":
        ranks.saved()
    ranks.change("model.layers.1", lambda values: values[:1].fill_(math.nan))
    if when == "before":
        ranks.saved()

    found = ranks.movements()
    save = Save(number=500, layers=LAYERS, ages=dict.fromkeys(LAYERS, 1), movements=found.relative)
    weighted = replace(save, weighted_movements=found.weighted)

    for moved in (dict(found.relative), dict(found.weighted)):
        assert not math.isfinite(moved.pop("model.layers.1"))
        assert moved == dict.fromkeys(ALL - {"model.layers.1"}, 0.0)
    assert [Drift(stalest=1000).due(of) for of in (save, weighted)] == [{"model.layers.1"}] * 2


def test_another_model_is_measured_from_its_own_first_save(tmp_path: Path) -> None:
    """If the layers change, all are measured again; also if an engine was filled from elsewhere."""
    ranks = Ranks(tmp_path / "small")
    ranks.saved()
    larger = Ranks(tmp_path / "large", layers=4)
    ranks._captured = larger._captured

    assert ranks.movements() == Movements()
    ranks.saved(frozenset({"model.layers.3"}))
    assert ranks.movements().relative == {"model.layers.3": 0.0}
    for watch in ranks._watches:
        watch.forget()
    assert ranks.movements() == Movements()
