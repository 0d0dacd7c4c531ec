"""torchtitan's checkpoint manager saves to a store and goes on from it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import layerstore
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, train
from tests.live.test_hugging_face import steps

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX),
    pytest.mark.skipif(
        find_spec("torchtitan") is None,
        reason="torchtitan is not installed: it needs triton, datasets, tyro and others, a gigabyte in all",
    ),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what two ranks have left."""
    out = tmp_path_factory.mktemp("torchtitan")
    train("tests.live.torchtitan_store", ["--out", str(out)], log=out / "train.log")
    return out


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_training_goes_on_from_the_store_as_if_it_had_never_stopped(trained: Path, mode: str) -> None:
    """In each mode of saving: torchtitan's model, optimizer, schedule and count come back bit for bit."""
    losses = json.loads((trained / f"{mode}.json").read_text())

    assert losses["left"] == losses["whole"][:3]
    assert losses["resumed"] == losses["whole"][2:]
    with layerstore.open(trained / "store") as store:
        assert steps(store, mode) == [2, 4, 6]
        assert store.verify(mode, read_data=True).ok
