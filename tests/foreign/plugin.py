"""In the pytest that runs DeepSpeed's tests: keeps those of some ZeRO stages, and notes what came of each."""

import faulthandler
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = "LAYERSTORE_WAY"
"""The variable with the folder for what is noted, and for stores; it is called like the way."""

OUTCOMES = "outcomes.jsonl"

SAVES = "saves"

TEST_SECONDS_MAX = 300
"""A rank that has failed alone leaves the others waiting: then all of it ends."""

STAGES = "LAYERSTORE_STAGES"
"""The variable with the stages whose tests are kept."""

STAGE_OF = {"ZeROPP": 3, "Stage3": 3, "Elastic": 2, "SharedWeights": 2}
"""By a part of the names of classes whose tests have no parameter ``zero_stage``."""

_stages: dict[str, int] = {}
"""By test."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the ranks begin with DeepSpeed imported, and wrapped."""
    multiprocessing.set_forkserver_preload(["tests.foreign.ways"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all that is not about the stages asked for."""
    asked = set(map(int, os.environ[STAGES].split()))
    kept = [item for item in items if _stage_of(item) in asked]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    _stages.update({item.nodeid: _stage_of(item) for item in kept})
    items[:] = kept


def _stage_of(item: pytest.Item) -> int:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if "zero_stage" in parameters:
        return int(parameters["zero_stage"])
    named = getattr(getattr(item, "cls", None), "__name__", "")
    return next((stage for part, stage in STAGE_OF.items() if part in named), 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """End where one test takes far too long."""
    _note(item.nodeid, "hung", "")  # unless another line follows
    faulthandler.dump_traceback_later(TEST_SECONDS_MAX, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended."""
    if report.when == "call" or not report.passed:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _note(report.nodeid, report.outcome, reason)


def _note(test: str, outcome: str, reason: str) -> None:
    folder = Path(os.environ[FOLDER])
    saves = (folder / SAVES).read_text().count("\n") if (folder / SAVES).exists() else 0
    line = json.dumps({"test": test, "stage": _stages[test], "outcome": outcome, "saves": saves, "reason": reason})
    with (folder / OUTCOMES).open("a") as notes:
        notes.write(f"{line}\n")
