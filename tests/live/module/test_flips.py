"""Flipped bytes in what attach has saved: noticed by resume, each of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import layerstore
from layerstore.errors import IntegrityError
from tests.live.dcp.states import all_bits
from tests.live.module.alone import new, raw
from tests.live.module.models import train


@pytest.mark.parametrize("places", [10, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_flipped_bytes_are_noticed_by_resume(tmp_path: Path, places: int) -> None:
    """Wherever they are: nothing damaged is taken, and nothing of the module has changed."""
    model, optimizers = new()
    with layerstore.attach(model, optimizers, tmp_path / "store", run="sft") as saver:
        train(model, optimizers, 0, 2)
        saver.save()
    files = [
        path for part in ("objects", "commits") for path in (tmp_path / "store" / part).rglob("*") if path.is_file()
    ]
    chance = random.Random(places)
    again, its = new(seed=5)
    before = all_bits(raw(again, its))

    unnoticed = []
    for number, path in enumerate(chance.choices(sorted(files), k=places)):
        path.chmod(0o600)
        data = path.read_bytes()
        place = chance.randrange(len(data)) if number % 5 else len(data) - 1
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :])
        try:
            layerstore.resume(again, its, tmp_path / "store", run="sft", must_exist=True)
            unnoticed.append((path.name, place))
        except IntegrityError:
            assert all_bits(raw(again, its)) == before
        path.write_bytes(data)

    assert not unnoticed
    layerstore.resume(again, its, tmp_path / "store", run="sft")
    assert all_bits(raw(again, its)) == all_bits(raw(model, optimizers))
