"""What all tests share: an environment without the user's own settings."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the user's own settings: a test that needs one sets it, and sees no other. Seeds are for the tests."""
    for name in list(os.environ):
        if name.startswith("LAYERSTORE_") and not name.endswith("_SEED"):
            monkeypatch.delenv(name)
