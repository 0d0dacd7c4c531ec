"""What the quality benchmark says of compact saves, as far as it needs no training: ways to keep a state, points."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.quality import precision_trial, real_model
from tests.bench.quality.coded import WAYS, Lost, Parameter, kept
from tests.bench.quality.settings import REAL, TINY
from tests.bench.quality.training import llama
from tests.bench.rows import Rows


def test_a_way_to_keep_a_state_loses_what_it_says() -> None:
    """Bytes fall from one to the next, exact masters stay, and what is dropped costs the whole update."""
    random = np.random.default_rng(1)
    keyframe = random.normal(size=(64, 256)).astype(np.float32)
    of = Parameter(
        master=keyframe + random.normal(0, 1e-4, keyframe.shape).astype(np.float32),
        first=random.normal(0, 1e-3, keyframe.shape).astype(np.float32),
        second=(random.normal(size=(64, 1)) ** 2 * random.normal(size=(1, 256)) ** 2 + 1e-9).astype(np.float32),
    )
    found = dict[str, tuple[float, float, float]]()
    for name, way in WAYS.items():
        lost = Lost()
        lost.add(of, kept(way, of, keyframe=keyframe), keyframe=keyframe)
        found[name] = (way.bytes(keyframe.shape) / keyframe.size, lost.of_movement, lost.of_update)

    assert {name: round(size, 1) for name, (size, _, _) in found.items()} == {
        "moments8": 6.0,
        "delta8": 3.1,
        "delta4": 1.6,
        "delta4, v factored": 1.1,
        "bf16 masters, moments8": 4.0,
        "moments dropped": 4.0,
    }
    errors = {name: movement for name, (_, movement, _) in found.items()}
    assert errors["moments8"] == errors["moments dropped"] == 0.0
    assert 0 < errors["delta8"] < 0.01 < errors["delta4"] < 0.2
    assert errors["bf16 masters, moments8"] > 1
    assert 0 < found["moments8"][2] < 0.05
    assert found["moments dropped"][2] == 1.0


def test_a_precision_is_looked_at_where_the_history_is_long_enough() -> None:
    """The newest save is among the points, and each has its keyframe in the history."""
    assert [len(precision_trial.points(REAL, distance)) for distance in (1, 5, 9, 40, 79)] == [3, 3, 3, 3, 1]
    assert precision_trial.points(TINY, 6) == []
    for distance in REAL.distances:
        points = precision_trial.points(REAL, distance)
        assert points[-1] == REAL.steps
        assert points[0] - distance * REAL.save_every >= REAL.save_every


@pytest.mark.full
def test_a_model_is_resumed_in_every_way(tmp_path: Path) -> None:
    """An exact state goes on to the same loss, other batches to another; what is there is not made again."""
    random = torch.Generator().manual_seed(1)
    trained, held_out = (torch.randint(0, 512, (count, 32), generator=random) for count in (40, 8))
    rows, size = Rows(tmp_path / "real.jsonl"), replace(real_model.HANDFUL, sequence=32, rate=1e-2)

    for _ in range(2):
        real_model.run(size, rows=rows, material=(llama(TINY), trained, held_out))

    found = {row["way"]: row for row in rows.find()}
    assert found.keys() == {real_model.EXACT, real_model.NOISE, *WAYS}
    assert len(rows.find()) == len(found)
    assert (found["exact"]["at_once"], found["exact"]["at_end"], found["exact"]["error"]) == (0.0, 0.0, 0.0)
    assert abs(found["delta8"]["at_end"]) < abs(found[real_model.NOISE]["at_end"])
    assert found["exact"]["end"] != found["exact"]["at_failure"] != found["exact"]["before"]
