"""In the pytest that runs DeepSpeed's tests: keeps those of ZeRO stage 3, and notes what came of each."""

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

STAGE_3 = ("ZeROPP", "Stage3")
"""In the names of classes whose tests have no parameter ``zero_stage``."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the ranks begin with DeepSpeed imported, and wrapped."""
    multiprocessing.set_forkserver_preload(["tests.foreign.ways"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all that is not about stage 3."""
    kept = [item for item in items if _is_stage_3(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _is_stage_3(item: pytest.Item) -> bool:
    parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    if "zero_stage" in parameters:
        return bool(parameters["zero_stage"] == 3)
    return isinstance(item, pytest.Function) and any(part in getattr(item.cls, "__name__", "") for part in STAGE_3)


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
    line = json.dumps({"test": test, "outcome": outcome, "saves": saves, "reason": reason})
    with (folder / OUTCOMES).open("a") as notes:
        notes.write(f"{line}\n")
