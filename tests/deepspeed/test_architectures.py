"""What an estimate takes from a config is what Transformers makes of it: every name and shape, in the same order."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from layerstore.live.ranks import cpu_environment
from layerstore.ops.architectures import known_architectures, model_of
from tests.deepspeed.launch import LAUNCH_SECONDS_MAX
from tests.environment import REPOSITORY

Shapes = list[tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Shapes]:
    """Return the folder of every case's config.json, with the parameters of the real model."""
    folder = tmp_path_factory.mktemp("architectures")
    finished = subprocess.run(
        [sys.executable, "-m", "tests.deepspeed.architectures", str(folder)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=cpu_environment(),
        timeout=LAUNCH_SECONDS_MAX,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    told = json.loads(finished.stdout.splitlines()[-1])
    return {folder / case: [(name, tuple(shape)) for name, shape in shapes] for case, shapes in told.items()}


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 60)
def test_every_architecture_has_the_parameters_that_transformers_gives_it(real: dict[Path, Shapes]) -> None:
    """For each of them: the usual settings, and those that change what there is."""
    wrong = {folder.name for folder, shapes in real.items() if list(model_of(folder).shapes) != shapes}

    assert wrong == set()
    assert len(real) > 20


@pytest.mark.timeout(LAUNCH_SECONDS_MAX + 60)
def test_no_architecture_is_known_that_was_not_compared(real: dict[Path, Shapes]) -> None:
    """A new one has to be added to the cases."""
    assert known_architectures() == sorted({str(model_of(folder).architecture) for folder in real})
