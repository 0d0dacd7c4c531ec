"""Fixtures that hold real checkpoints: trained once, kept in pytest's cache, shared by all tests.

Nothing under a launch's folder may be written to: other tests, and other test runs, read the same files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import layerstore
from tests.deepspeed.asked import scenarios_asked
from tests.deepspeed.composites import Composites, compose_hugging_face, compose_scenarios, mix_scenarios
from tests.deepspeed.launch import Launch, cached_launch


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
def composed(trained: Launch, tmp_path_factory: pytest.TempPathFactory) -> Composites:
    """Return a composite of each scenario, all from one store."""
    store = layerstore.init(tmp_path_factory.mktemp("deepspeed") / "store")
    return compose_scenarios(trained.root, store, tmp_path_factory.mktemp("composed"))


@pytest.fixture(scope="session")
def composed_hugging_face(trained_hugging_face: Launch, tmp_path_factory: pytest.TempPathFactory) -> Composites:
    """Return a composite of each Trainer and Accelerate checkpoint, all from one store."""
    store = layerstore.init(tmp_path_factory.mktemp("deepspeed") / "store")
    return compose_hugging_face(trained_hugging_face.root, store, tmp_path_factory.mktemp("composed"))


@pytest.fixture(scope="session")
def mixed_store(tmp_path_factory: pytest.TempPathFactory) -> layerstore.Store:
    """Return the store that the mixed composites are made from."""
    return layerstore.init(tmp_path_factory.mktemp("deepspeed") / "store")


@pytest.fixture(scope="session")
def mixed(trained: Launch, mixed_store: layerstore.Store, tmp_path_factory: pytest.TempPathFactory) -> Composites:
    """Return composites of both saves of each scenario, one under each policy."""
    return mix_scenarios(trained.root, mixed_store, tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="session")
def went_on(request: pytest.FixtureRequest, launch_cache: Path, mixed: Composites) -> Launch:
    """Return what DeepSpeed made of the mixed composites that tests ask about."""
    asked = scenarios_asked(request, "went_on")
    names = [name for name in mixed.some_names() if name in asked]
    return cached_launch(launch_cache, "mixed", resume_from=mixed.root, names=names)


@pytest.fixture(scope="session")
def resumed(request: pytest.FixtureRequest, launch_cache: Path, composed: Composites) -> Launch:
    """Return the training that went on from the composites that tests ask about."""
    asked = scenarios_asked(request, "resumed")
    names = [name for name in composed.some_names() if name in asked]
    return cached_launch(launch_cache, "training", resume_from=composed.root, names=names)


@pytest.fixture(scope="session")
def resumed_hugging_face(launch_cache: Path, composed_hugging_face: Composites) -> Launch:
    """Return what the Trainer and Accelerate made of the composites."""
    return cached_launch(
        launch_cache,
        "trainer",
        resume_from=composed_hugging_face.root,
        names=composed_hugging_face.some_names(),
    )
