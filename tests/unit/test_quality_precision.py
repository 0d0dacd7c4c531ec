"""What the quality benchmark says of compact saves, as far as it needs no training: ways, bytes, bounds, tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bench.quality import precision_trial, real_model, table
from tests.bench.quality.arms import FULL, NOISE
from tests.bench.quality.coded import WAYS, Lost, Parameter, kept
from tests.bench.quality.settings import REAL, TINY
from tests.bench.quality.training import llama
from tests.bench.rows import Rows
from tests.unit.test_quality import rows_of


def test_compact_saves_have_a_table_of_their_own() -> None:
    """Bytes of compact saves alone and with keyframes, bounds on both sides, and what was asked of the bytes."""
    rows = rows_of({FULL: [0.0] * 3, "moments8": [0.0002] * 3, "delta4": [-0.003] * 3, NOISE: [0.01] * 3})
    for row in [row for row in rows if row["kind"] == "trunk"]:
        of = {"kind": "save", "task": row["task"], "seed": row["seed"], "movements": {}}
        for arm, compact in (("moments8", 6000), ("delta4", 2000)):
            rows += [
                {**of, "arm": arm, "step": step, "bytes": 12000 if step == 1 else compact, "is_exact": step == 1}
                for step in range(1, 21)
            ]

    [_, compact_saves, *_] = table.tables(TINY, table.Findings(rows))

    assert "other batches alone move the loss by 0.0100" in compact_saves.title
    assert compact_saves.lines == (
        ("moments8", "+0.00020", "±0.00000", "±0.001", "within", "2.00x of 1.9x", "1.82x", "1.90x", "1.90x"),
        ("delta4", "-0.00300", "±0.00000", "±0.002", "outside", "6.00x MISSED 7x", "4.00x", "4.80x", "4.80x"),
    )


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


def test_a_row_of_the_trials_is_a_line() -> None:
    """A column for each distance to the keyframe; of the real model, the largest run."""
    of = {"kind": "precision", "way": "delta8", "bytes": 300, "parameters": 100, "step": 5}
    looked = [{**of, "distance": at, "damage": 1e-4 * at, "error": 0.01, "update_error": 0.02} for at in (1, 5)]
    model = {"kind": "real", "way": "delta8", "at_once": 0.001, "at_end": -0.002, "before": 3.0, "end": 2.0}
    model |= {"bytes": 300, "parameters": 100, "error": 0.01, "update_error": 0.02, "rate": 2e-5, "batch": 1}
    rows = [{**model, "steps": steps, "sequence": 96, "failure": 4, "keyframe": 2} for steps in (6, 40)]

    tried, resumed = precision_trial.table(looked), real_model.table(rows)

    assert tried is not None
    assert tried.lines == (("delta8", "+0.00010", "+0.00050", "1.0%", "1.0%", "2.0%"),)
    assert resumed is not None
    assert "40 steps at 2e-05" in resumed.title
    assert resumed.lines == (("delta8", "4.00x", "+0.00100", "-0.00200", "1.00%", "2.00%"),)
    assert precision_trial.table([]) is None is real_model.table([])


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
