"""Which scenarios a run of the tests is about: all of them in the full one, else a sample."""

from pathlib import Path
from typing import Any

import pytest


def scenarios_asked(request: pytest.FixtureRequest, fixture: str, **others: object) -> set[str]:
    """Return the scenarios of the tests of this run that use *fixture*, where their *others* are these."""
    functions = [item for item in request.session.items if isinstance(item, pytest.Function)]
    ours = [item for item in functions if item.path.parent == Path(__file__).parent and fixture in item.fixturenames]
    found: list[dict[str, Any]] = [item.callspec.params for item in ours]
    return {each["scenario"].name for each in found if others.items() <= each.items()}
