"""What the demo measures of stores, on checkpoints that nobody had to train."""

from pathlib import Path
from typing import Any

import layerstore
from layerstore.live.demo.stores import (
    resized,
    same_layers,
)
from tests.generated import generate

SMALL: dict[str, Any] = {"layers": 6, "hidden": 32, "vocab": 32}
STEPS = [1, 2, 3]


def test_every_bit_of_every_array_is_compared_whatever_the_ranks(tmp_path: Path) -> None:
    """Equal arrays are found equal, others are not; layers sharded for other ranks are other versions."""
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
