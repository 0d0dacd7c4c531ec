"""Fixtures that hold real checkpoints: trained once, kept in pytest's cache, shared by all tests.

Nothing under a launch's folder may be written to: other tests, and other test runs, read the same files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import layerstore
from layerstore import Store
from tests.deepspeed.launch import Launch, cached_launch
from tests.deepspeed.scenarios import HUGGING_FACE_SCENARIOS, RESUME_STEP, SAVE_STEPS, SCENARIOS


@pytest.fixture(scope="session")
def launch_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that keeps launches between sessions, or for this one only if pytest has no cache."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return cache.mkdir("deepspeed-launches") if cache else tmp_path_factory.mktemp("deepspeed-launches")


@pytest.fixture(scope="session")
def trained(launch_cache: Path) -> Launch:
    """Return the uninterrupted training of all scenarios."""
    return cached_launch(launch_cache, "training")


@pytest.fixture(scope="session")
def trained_hugging_face(launch_cache: Path) -> Launch:
    """Return the uninterrupted training through the Trainer and through Accelerate."""
    return cached_launch(launch_cache, "trainer")


@pytest.fixture(scope="session")
def stored(trained: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store with both checkpoints of every scenario, each a run."""
    with layerstore.init(tmp_path_factory.mktemp("deepspeed") / "store") as store:
        for scenario in SCENARIOS:
            for step in SAVE_STEPS:
                folder = scenario.save_dir(trained.root, step=step)
                commit = store.ingest(folder, run=scenario.name, tag=scenario.tag(step=step))
                assert step == commit.step
        yield store


@pytest.fixture(scope="session")
def stored_hugging_face(trained_hugging_face: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Return a store with both checkpoints of the Trainer's and Accelerate's runs, whose tags it found by itself."""
    with layerstore.init(tmp_path_factory.mktemp("deepspeed") / "store") as store:
        for scenario in HUGGING_FACE_SCENARIOS:
            for step in SAVE_STEPS:
                commit = store.ingest(scenario.checkpoint(trained_hugging_face.root, step=step), run=scenario.name)
                assert step == commit.step
        yield store


@pytest.fixture(scope="session")
def composed(stored: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a composite of each scenario's first checkpoint, laid out like a launch."""
    root = tmp_path_factory.mktemp("composed")
    for scenario in SCENARIOS:
        write_composite(stored, scenario.name, scenario.save_dir(root, step=RESUME_STEP))
    return root


@pytest.fixture(scope="session")
def composed_hugging_face(stored_hugging_face: Store, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same of the Trainer's and Accelerate's."""
    root = tmp_path_factory.mktemp("composed")
    for scenario in HUGGING_FACE_SCENARIOS:
        write_composite(stored_hugging_face, scenario.name, scenario.checkpoint(root, step=RESUME_STEP))
    return root


def write_composite(store: Store, run: str, out: Path) -> None:
    """Write *run*'s checkpoint of the step to resume from into the new folder *out*."""
    out.parent.mkdir(parents=True, exist_ok=True)
    store.compose(f"{run}@{RESUME_STEP}", policy="exact").write(out)


def scenarios_asked(request: pytest.FixtureRequest, fixture: str, **others: object) -> list[str]:
    """Return the scenarios of the tests of this run that use *fixture*, where their *others* are these."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    ours = [item for item in functions if item.path.parent == Path(__file__).parent and fixture in item.fixturenames]
    found: list[dict[str, Any]] = [item.callspec.params for item in ours]
    names = {each["scenario"].name for each in found if others.items() <= each.items()}
    return [scenario.name for scenario in SCENARIOS if scenario.name in names]
