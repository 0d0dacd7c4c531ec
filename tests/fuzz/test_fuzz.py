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


@pytest.mark.fault(57, 59, 76)
@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(120, marks=pytest.mark.sample(10, by="name")),
        pytest.param(20_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
    ],
)
def test_changed_input_is_refused_or_harmless(fast_path: Path, name: str, count: int) -> None:
    """Flips, cuts, splices, lies, bombs and nests, and values that fit the grammar and nothing else."""
    accepted, refused = fed(MODULE, name, count=count, folder=fast_path)

    assert accepted + refused >= count
    assert refused or name == "timings" or count < 1000
    assert not (fast_path / "canary").exists()


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
