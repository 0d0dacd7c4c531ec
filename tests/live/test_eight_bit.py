"""Moments in blocks of 8 bits cannot be split by layer: such a run is saved whole, goes on whole, or is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import layerstore
from layerstore.errors import LayoutMismatch, Unsupported
from layerstore.store import Store
from tests.deepspeed.compare import checkpoint_differences
from tests.forked import Launch, Nursery
from tests.live.eight_bit import RUN, SAVED, STEPS
from tests.live.launched import losses

pytestmark = pytest.mark.timeout(600)

NO_BITSANDBYTES = (
    "bitsandbytes is not installed: the blockwise optimizer, which has states of that shape, stands for it"
)
WHOLE_ONLY = "which cannot be split by layer"


@pytest.fixture(scope="module", params=["blockwise", "bitsandbytes"])
def trained(
    ranks: Nursery, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Launch, Path]:
    """Return what the ranks told, and the folder that they left."""
    if request.param == "bitsandbytes" and find_spec("bitsandbytes") is None:
        pytest.skip(NO_BITSANDBYTES)
    folder = tmp_path_factory.mktemp(request.param)
    layerstore.init(folder / "store").close()
    options = {"out": str(folder), "optimizer": request.param}
    with ranks.launch("tests.live.eight_bit:run", options, folder=folder, name="run") as launch:
        return launch.done(), folder


def test_the_very_save_resumes_bit_for_bit(trained: tuple[Launch, Path]) -> None:
    """All later losses are those of the training that was not interrupted, and what is composed is what was saved."""
    launch, folder = trained

    again, undisturbed = losses(launch, "again"), losses(launch)
    with Store(folder / "store") as store:
        for step in SAVED:
            store.compose(f"{RUN}@{step}", policy="exact").write(folder / f"composed-{step}")

    assert again == {step: loss for step, loss in undisturbed.items() if step > SAVED[0]}
    assert max(again) == STEPS
    for step in SAVED:
        tag = f"global_step{step}"
        assert checkpoint_differences(folder / "files" / tag, folder / f"composed-{step}" / tag) == []


def test_live_saves_of_some_layers_and_mixtures_are_refused(trained: tuple[Launch, Path]) -> None:
    """On all ranks, by name, before anything is written or filled."""
    launch, folder = trained
    found = {(event["name"], event["rank"]): (event["error"], event["message"]) for event in launch.events("raised")}

    for rank in range(2):
        for name in ("policy", "pressure"):
            error, message = found[name, rank]
            assert error == "InvalidInput"
            assert "the optimizer keeps 'state1'" in message
            assert WHOLE_ONLY in message
        error, message = found["mixed", rank]
        assert error == "LayoutMismatch"
        assert f"{RUN}@4 cannot be mixed with layers of {RUN}@2: its optimizer keeps 'state1'" in message
    with Store(folder / "store") as store:
        assert store.runs() == [RUN]


def test_composites_of_several_saves_or_for_other_ranks_are_refused(
    trained: tuple[Launch, Path], tmp_path: Path
) -> None:
    """There is no plan, pin or folder of them; weights alone can be exported."""
    _, folder = trained
    with Store(folder / "store") as store:
        mixed = store.compose(f"{RUN}@4", policy="parity")
        for refused in (mixed.plan, lambda: mixed.write(tmp_path / "mixed"), lambda: mixed.pin("mixed")):
            with pytest.raises(LayoutMismatch, match=WHOLE_ONLY) as raised:
                refused()
            assert "--policy exact at world size 2" in str(raised.value.hint)
        with pytest.raises(LayoutMismatch, match="cannot be composed for 3 ranks"):
            store.compose(f"{RUN}@4").write(tmp_path / "three", world_size=3)
        mixed.export(tmp_path / "weights")

    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_policy_that_would_store_some_layers_is_refused_by_ingest(
    trained: tuple[Launch, Path], tmp_path: Path
) -> None:
    """Whole, the same checkpoint is what the saver has saved."""
    _, folder = trained
    with layerstore.init(tmp_path / "store") as store:
        with pytest.raises(Unsupported, match=WHOLE_ONLY) as raised:
            store.ingest(folder / "files", tag="global_step2", run=RUN, policy="parity")
        assert "policy full" in str(raised.value.hint)
        assert store.runs() == []

        store.ingest(folder / "files", tag="global_step2", run=RUN)
        with Store(folder / "store") as live:
            assert [choice.version for choice in store.compose(f"{RUN}@2").layers.values()] == [
                choice.version for choice in live.compose(f"{RUN}@2").layers.values()
            ]
