"""
Whatever is parsed, however it was changed: a value or an error of the right kind, in bounded time and memory.

Bounds for each input and each child: tests/fuzz/harness.py. The inputs of each parser: tests/fuzz/parsers.py.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st

from layerstore.errors import InvalidInput
from layerstore.limits import MIB
from tests.fuzz import parsers
from tests.fuzz.harness import Parser, fed


@pytest.mark.fault(57, 59, 76)
@pytest.mark.parametrize("name", [name for name in parsers.PARSERS if name not in parsers.STORES])
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(120, marks=pytest.mark.sample(10, by="name")),
        pytest.param(20_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
    ],
)
def test_changed_input_is_refused_or_harmless(fast_path: Path, name: str, count: int) -> None:
    """Flips, cuts, splices, lies, bombs and nests, and values that fit the grammar and nothing else."""
    accepted, refused = fed(parsers.__name__, name, count=count, folder=fast_path)

    assert accepted + refused >= count
    assert refused or name == "timings" or count < 1000
    assert not (fast_path / "canary").exists()


@pytest.mark.fault(135, 136)
@pytest.mark.parametrize("name", parsers.STORES)
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(5, marks=pytest.mark.sample(1, by="name")),
        pytest.param(30, marks=pytest.mark.full),
        pytest.param(2_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
    ],
)
def test_a_store_that_says_something_else_is_refused_or_harmless(fast_path: Path, name: str, count: int) -> None:
    """Whatever is asked of it: its names and checksums are right, and no path leads out of it."""
    accepted, refused = fed(parsers.__name__, name, count=count, folder=fast_path)

    assert accepted + refused >= count


# -- the fuzzer itself ---------------------------------------------------------------------------------------------


def _careless(data: bytes, folder: Path) -> object:
    if b"\xff" in data:
        raise IndexError("nobody checks this")
    return data


def _slow(data: bytes, folder: Path) -> object:
    while b"\xff" in data:
        pass
    return data


def _greedy(data: bytes, folder: Path) -> object:
    return bytes(300 * MIB) if b"\xff" in data else data


def _trusting(data: bytes, folder: Path) -> object:
    return os.system("true") if b"\xff" in data else data


def _silent(data: bytes, folder: Path) -> object:
    raise InvalidInput("")


def _rambling(data: bytes, folder: Path) -> object:
    error = InvalidInput("one line")
    error.message += "\nand another"
    raise error


FAULTY = {
    _careless: "IndexError",
    _slow: "TooSlow",
    _greedy: "MemoryError",
    _trusting: "Executed",
    _silent: "an error without words",
    _rambling: "an error that is not one line",
}
PARSERS = {
    parse.__name__: partial(Parser, inputs=st.binary(max_size=4), parse=parse, right=(InvalidInput,), seconds_max=0.1)
    for parse in FAULTY
}


@pytest.mark.parametrize(("name", "found"), [(parse.__name__, found) for parse, found in FAULTY.items()])
def test_faults_are_found(fast_path: Path, name: str, found: str) -> None:
    """Of parsers that crash, hang, swell, run something or say nothing."""
    with pytest.raises(AssertionError, match=found):
        fed(__name__, name, count=2000, folder=fast_path)
