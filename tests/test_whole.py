"""
The whole path, once: DeepSpeed trains, layerstore saves and composes, DeepSpeed resumes to the last bit.

``tests/deepspeed`` does the same with every shape of checkpoint, in the full tier.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import layerstore
from tests import whole
from tests.deepspeed.compare import checkpoint_differences
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX, train
from tests.deepspeed.scenarios import RESUME_STEP, SAVE_STEPS

# The first test to ask for a launch waits for it, on a fresh machine for its compiler too.
pytestmark = pytest.mark.timeout(2 * LAUNCH_SECONDS_MAX)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a training left, which was resumed from a composite and from the store."""
    root = tmp_path_factory.mktemp("whole")
    layerstore.init(root / whole.STORE)
    train("tests.whole", ["--out", str(root)], log=root / "trained.log")
    with layerstore.open(root / whole.STORE) as store:
        for step in SAVE_STEPS:
            store.ingest(root / whole.CHECKPOINTS / whole.TRAINED, tag=f"global_step{step}", run="ingested")
        store.compose(f"ingested@{RESUME_STEP}").write(root / whole.COMPOSITE)
    train("tests.whole", ["--out", str(root), "--resume"], log=root / "resumed.log")
    return root


def test_a_live_save_is_the_checkpoint_that_deepspeed_writes(out: Path) -> None:
    """Saved while training goes on or ingested afterwards: the versions of all layers are the same."""
    with layerstore.open(out / whole.STORE) as store:
        for step in SAVE_STEPS:
            live, ingested = (store.compose(f"{run}@{step}") for run in (whole.RUN, "ingested"))

            assert {name: layer.version for name, layer in live.layers.items()} == {
                name: layer.version for name, layer in ingested.layers.items()
            }
        assert store.verify().ok


@pytest.mark.parametrize("name", [whole.LOADED, whole.RESUMED])
def test_training_goes_on_as_if_nothing_had_happened(out: Path, name: str) -> None:
    """From a composite through DeepSpeed's loader, and from the store: the same losses, then the same checkpoint."""
    trained, resumed = (json.loads((out / f"{which}.json").read_text()) for which in (whole.TRAINED, name))
    tag = f"global_step{SAVE_STEPS[-1]}"

    assert trained[RESUME_STEP:] == resumed
    assert not checkpoint_differences(*(out / whole.CHECKPOINTS / which / tag for which in (whole.TRAINED, name)))
