"""The callbacks of the guide on metrics take commits, failures and sizes into each tracker, where they can be read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerstore.publish import SaveTiming
from tests.docs.pages import DOCS, blocks

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

COMMIT = "ab" * 32
SAVED = SaveTiming(
    run="sft",
    attempt=1,
    step=200,
    save_number=3,
    blocked_seconds=0.25,
    durable_seconds=1.0,
    visible_seconds=1.5,
    copied_bytes=10,
    written_bytes=7,
    layers_saved=4,
    layers=4,
    queued=0,
    failure="",
    commit=COMMIT,
)
FAILED = replace(SAVED, step=300, commit="", failure="the disk is full", visible_seconds=None, written_bytes=0)


def callback(name: str) -> tuple[Callable[[SaveTiming], None], dict[str, Any]]:
    """Return the guide's callback *name*, and the names of its block."""
    [block] = [each for each in blocks(DOCS / "guides" / "metrics.md", "python") if f"def {name}" in each.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, name, "exec"), names)  # the guide's own text
    return names[name], names


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: nothing is sent."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    to_wandb, _ = callback("to_wandb")
    run = wandb.init(dir=str(tmp_path), project="sft")

    for timing in (FAILED, SAVED):
        to_wandb(timing)
        wandb.log({"loss": 2.5})

    summary = dict(run.summary)
    run.finish()
    assert (summary["layerstore/commit"], summary["loss"]) == (f"sft@200 {COMMIT}", 2.5)
    assert summary["layerstore/failure"] == "sft@300 the disk is full"
    assert (summary["layerstore/blocked_seconds"], summary["layerstore/written_bytes"]) == (0.25, 7)
    assert list(tmp_path.rglob("*.wandb"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its files in a folder."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    to_mlflow, _ = callback("to_mlflow")

    with mlflow.start_run() as run:
        to_mlflow(SAVED)
        to_mlflow(FAILED)

    found = mlflow.get_run(run.info.run_id).data
    assert found.tags["layerstore.commit.200"] == f"sft@200 {COMMIT}"
    assert found.tags["layerstore.failure.300"] == "sft@300 the disk is full"
    assert found.metrics == {"layerstore.blocked_seconds": 0.25, "layerstore.written_bytes": 0}


def test_tensorboard(tmp_path: Path) -> None:
    """In the files that it reads."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    to_tensorboard, names = callback("to_tensorboard")
    to_tensorboard(SAVED)
    to_tensorboard(FAILED)
    names["writer"].close()

    events = reader.EventAccumulator(str(tmp_path / "runs" / "sft")).Reload()
    [text] = events.Tensors("layerstore/commit/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (200, [f"sft@200 {COMMIT}".encode()])
    [failure] = events.Tensors("layerstore/failure/text_summary")
    assert (failure.step, failure.tensor_proto.string_val) == (300, [b"sft@300 the disk is full"])
    sizes = events.Scalars("layerstore/written_bytes")
    assert [(scalar.step, scalar.value) for scalar in sizes] == [(200, 7), (300, 0)]
