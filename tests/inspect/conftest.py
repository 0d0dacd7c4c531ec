"""A browser for each module that looks at the report."""

import shutil
from collections.abc import Iterator

import pytest

from tests.inspect.chromium import Browser, program


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a browser of the module's own."""
    path, profile = program(), tmp_path_factory.mktemp("profile")
    assert path is not None
    started = Browser(path, profile)
    yield started
    started.close()
    shutil.rmtree(profile, ignore_errors=True)
