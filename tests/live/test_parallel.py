"""Ranks that share the state in other ways: what goes on bit for bit, and what is refused when it is attached."""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from layerstore.store import Store
from tests.deepspeed.compare import checkpoint_differences
from tests.forked import Nursery
from tests.live.launched import losses
from tests.live.parallel import SAVED, STEPS

REFUSED = {
    "mesh_param": "the optimizer's state is shared among 1 of 2 ranks",
    "mesh in the config": "the optimizer's state is shared among 1 of 2 ranks",
    "elastic": "was saved with elastic_checkpoint",
    "pipeline": "the engine is a pipeline",
    "AutoTP": "tensor parallelism of degree 2",
}


@pytest.mark.fault(152, 153)
def test_what_cannot_be_saved_is_refused_when_it_is_attached(ranks: Nursery, tmp_path: Path) -> None:
    """And not at the first save, hours later: on every rank, with the class that an ingest of its files raises."""
    layerstore.init(tmp_path / "store").close()

    with ranks.launch(
        "tests.live.parallel:refused", {"store": str(tmp_path / "store")}, folder=tmp_path, name="refused"
    ) as launch:
        launch.done()

    raised = {(event["name"], event["rank"]): (event["error"], event["message"]) for event in launch.events("raised")}
    assert raised.keys() == {(name, rank) for name in REFUSED for rank in (0, 1)}
    assert {error for error, _ in raised.values()} == {"Unsupported"}
    assert [name for (name, _), (_, message) in raised.items() if REFUSED[name] not in message] == []


@pytest.mark.fault(154)
def test_sequence_parallelism_with_an_mpu_goes_on_bit_for_bit(ranks: Nursery, tmp_path: Path) -> None:
    """Ulysses: under every stage, what is saved live is what DeepSpeed saves, and resumes as its own files do."""
    layerstore.init(tmp_path / "store").close()
    options = {"store": str(tmp_path / "store"), "out": str(tmp_path)}

    with ranks.launch("tests.live.parallel:sequence_parallel", options, folder=tmp_path, name="ulysses") as launch:
        launch.done()

    for stage in ("stage1", "stage2", "stage3"):
        on = {step: loss for step, loss in losses(launch, stage).items() if step > SAVED}
        assert max(on) == STEPS
        assert losses(launch, f"{stage} from own") == losses(launch, f"{stage} from store") == on
        with Store(tmp_path / "store") as store:
            store.compose(f"{stage}@{SAVED}").write(tmp_path / f"composed-{stage}")
        tag = f"global_step{SAVED}"
        assert checkpoint_differences(tmp_path / stage / tag, tmp_path / f"composed-{stage}" / tag) == []
