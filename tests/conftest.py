"""What all tests share: an environment without the user's own settings, and patience."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

import layerstore
from layerstore import Store
from tests import generated, operators, sampling, tiers
from tests.environment import claim_memory, memory
from tests.inspect.chromium import Browser, program
from tests.unit.checkpoints import Checkpoints

# A busy machine is not a failure. Examples are random: a failure prints how to repeat it.
settings.register_profile("patient", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Deepspeed has itself asked to seed torch before each part of each test: every process would import it, and torch
# keeps the stack each time, for devices that are not there.
pytest_randomly.entrypoint_reseeds = []


# What trains, is killed or goes on for as long as it is told to. Last of all it would keep one processor waiting.
LONG = ("live", "deepspeed", "stateful", "faults", "report", "docs")


# What a whole run needs at once, and to spare.
MEMORY_BYTES_MIN = 8 << 30


def pytest_configure(config: pytest.Config) -> None:
    """Sample large matrices, and let all processes share what was compiled or generated, apart from the user's own."""
    config.pluginmanager.register(sampling)
    config.pluginmanager.register(tiers)
    # A process that is aborted leaves its stacks in what it has written.
    os.environ["PYTHONFAULTHANDLER"] = "1"
    config.add_cleanup(claim_memory())
    # Most tests wait for a disk to sync what nobody will read again. What wants a disk makes itself one.
    if (folder := memory()) is not None and shutil.disk_usage(folder).free >= MEMORY_BYTES_MIN:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))
    # Hundreds of processes are started: what one of them has compiled, the others need not.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if not hasattr(config, "workerinput") and (claimed := operators.claim()):
        config.add_cleanup(claimed.release)
    if not generated.is_kept():
        config.add_cleanup(generated.keep_made())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; apart from that any order will do."""
    long = {Path(__file__).parent / part for part in LONG}
    items.sort(key=lambda item: long.isdisjoint(item.path.parents))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Return a store with nothing in it."""
    with layerstore.init(tmp_path / "store") as made:
        yield made


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Return what makes checkpoints."""
    return Checkpoints(tmp_path)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the user's own settings: a test that needs one sets it, and sees no other. Seeds are for the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for name in list(os.environ):
        if name.startswith("LAYERSTORE_") and not name.endswith("_SEED"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a browser of the module's own."""
    path, profile = program(), tmp_path_factory.mktemp("profile")
    assert path is not None
    started = Browser(path, profile)
    yield started
    started.close()
    shutil.rmtree(profile, ignore_errors=True)
