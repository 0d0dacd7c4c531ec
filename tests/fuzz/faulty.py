"""Parsers with faults, to show that the fuzzer finds each kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hypothesis import strategies as st

from layerstore.errors import InvalidInput
from layerstore.limits import MIB
from tests.fuzz.harness import Parser


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


def _faulty(parse: Callable[[bytes, Path], object]) -> Parser:
    return Parser(inputs=st.binary(max_size=4), parse=parse, right=(InvalidInput,), seconds_max=0.1)


PARSERS: dict[str, Callable[[], Parser]] = {
    parse.__name__[1:]: partial(_faulty, parse) for parse in (_careless, _slow, _greedy, _trusting, _silent, _rambling)
}
