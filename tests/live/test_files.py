"""What lies beside the shards of a save, and what that says of its folder."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from layerstore.live.files import Destination, Files
from layerstore.live.inert import Memory
from layerstore.live.seams import Engine
from layerstore.zero3 import TRAINER_STATE

TAG = "global_step7"


def files_in(folder: Path) -> Files:
    """Return the files of a save of one rank, to which more may come."""
    engine = cast(Engine, SimpleNamespace(rank=0, world_size=1, scripts=[]))
    return Files(engine, Memory("model"), Destination(folder=folder, tag=TAG, is_complete=False))


@pytest.mark.parametrize("is_trainers", [True, False])
def test_a_folder_is_what_it_was_when_training_went_on(tmp_path: Path, *, is_trainers: bool) -> None:
    """Who wrote it is seen neither before its files have come, nor after it was removed or changed."""
    folder = tmp_path / "checkpoint-7"
    (folder / TAG).mkdir(parents=True)
    files = files_in(folder)
    if is_trainers:
        (folder / TRAINER_STATE).write_text("{}")

    files.seal()
    shutil.rmtree(folder)
    if not is_trainers:
        folder.mkdir()
        (folder / TRAINER_STATE).write_text("{}")

    layout = files.layout(layer_pattern=None)
    assert (layout.flavour, layout.tag) == ("hf" if is_trainers else "raw", TAG)
    assert {file.name for file in files.wait()} == {"rng_state.pth", *([TRAINER_STATE] if is_trainers else [])}
