"""What the demo measures of stores, on checkpoints that nobody had to train."""

from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore.live.demo.stores import (
    POLICIES,
    mixture_of,
    resized,
    same_layers,
    usage_of_deepspeed,
    usage_under,
)
from tests.generated import generate

SMALL: dict[str, Any] = {"layers": 6, "hidden": 32, "vocab": 32}
STEPS = [1, 2, 3]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a save folder with a tag for every step."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in STEPS:
        generate(folder, step=step, seed=step, **SMALL)
    return folder


def test_what_is_saved_is_counted_and_a_mixture_is_what_the_policy_left(checkpoints: Path, tmp_path: Path) -> None:
    """For each policy; and the mixture by parity is not what saving everything has left."""
    plain = usage_of_deepspeed(checkpoints, STEPS)
    saved = {name: usage_under(name, checkpoints, STEPS, store=tmp_path / name, run="r") for name in POLICIES}

    assert plain.total_bytes == sum(path.stat().st_size for path in checkpoints.rglob("*.pt"))
    assert saved["full"].total_bytes > saved["parity"].total_bytes
    assert {name: each.later_bytes < 0.7 * each.first_bytes for name, each in saved.items()} == {
        "full": False,
        "parity": True,
        "filter": True,
    }
    with layerstore.open(tmp_path / "full") as store:
        mixed = store.compose("r@3", policy=POLICIES["parity"])
        mixture, wrong = (mixture_of(mixed, "parity", saved=tmp_path / name) for name in ("parity", "full"))

    assert (mixture.same, mixture.layers, mixture.oldest_steps) == (9, 9, 1)
    assert list(mixture.steps) == [3, 2]
    assert wrong.same == mixture.steps[3] < wrong.layers


def test_every_bit_of_every_array_is_compared_whatever_the_ranks(tmp_path: Path) -> None:
    """Equal ones are found equal, others are not; layers cut for other ranks are other versions."""
    numbers: dict[str, dict[str, Any]] = {
        "same": {"seed": 1, "world_size": 1},
        "two": {"seed": 1, "world_size": 2},
        "other": {"seed": 2},
    }
    with layerstore.init(tmp_path / "store") as store:
        for run, options in numbers.items():
            store.ingest(generate(tmp_path / run, step=1, **options, **SMALL), run=run)
        two, same, other = (store.compose(run) for run in ("two", "same", "other"))
        equal, different = resized(two, same), resized(two, other)

        assert (equal.ranks, equal.tensors, equal.same) == (1, 3 * (9 * 6 + 3), 3 * (9 * 6 + 3))
        assert different.same < different.tensors == equal.tensors
        assert set(same_layers(two, two).values()) == {True}
        assert set(same_layers(two, other).values()) == {False}
