"""What all tests share: an environment without the user's own settings, and patience."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure. Examples are random: a failure prints how to repeat it.
settings.register_profile("patient", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the user's own settings: a test that needs one sets it, and sees no other. Seeds are for the tests."""
    for name in list(os.environ):
        if name.startswith("LAYERSTORE_") and not name.endswith("_SEED"):
            monkeypatch.delenv(name)
