"""
Whatever is parsed, however it was changed: a value or an error of the right kind, in bounded time and memory.

Bounds for each input and each child: tests/fuzz/harness.py. The inputs of each parser: tests/fuzz/parsers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import faulty
from tests.fuzz.harness import fed
from tests.fuzz.parsers import PARSERS

MODULE = "tests.fuzz.parsers"
USUAL = 120
"""Inputs for each parser in a usual run."""
ALL = 20_000


@pytest.mark.fault(57, 59, 76)
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.sample(10)
def test_changed_input_is_refused_or_harmless(fast_path: Path, name: str) -> None:
    """Flips, cuts, splices, lies, bombs and nests, and values that fit the grammar and nothing else."""
    report = fed(MODULE, name, count=USUAL, folder=fast_path)

    assert report.accepted + report.refused >= USUAL
    assert not (fast_path / "canary").exists()


@pytest.mark.fault(57, 59, 76)
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_much_changed_input_is_refused_or_harmless(fast_path: Path, name: str) -> None:
    """The same, tens of thousands of times."""
    report = fed(MODULE, name, count=ALL, folder=fast_path)

    assert report.accepted + report.refused >= ALL
    assert report.refused or name == "timings"


# -- the fuzzer itself ---------------------------------------------------------------------------------------------


FOUND = {
    "careless": "IndexError",
    "slow": "TooSlow",
    "greedy": "MemoryError",
    "trusting": "Executed",
    "silent": "an error without words",
    "rambling": "an error that is not one line",
}


@pytest.mark.parametrize("name", faulty.PARSERS)
def test_faults_are_found(fast_path: Path, name: str) -> None:
    """Of parsers that crash, hang, swell, run something or say nothing."""
    with pytest.raises(AssertionError, match=FOUND[name]):
        fed("tests.fuzz.faulty", name, count=2000, folder=fast_path)
