"""
Feed a parser changed and made-up input, in a child that has bounds of its own, and look at what comes out.

What must come out is a value, or one of the errors that the parser is known for: no other exception, no signal,
no code that runs, in bounded time and memory. Each input lies on disk before it is parsed, so that one that
kills the child or never ends can be looked at.
"""

from __future__ import annotations

import codecs
import importlib
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from layerstore.errors import LayerstoreError
from layerstore.limits import MIB
from tests.faults.harness import in_child

INPUT_BYTES_MAX = MIB
"""How large a changed input may be: bombs are a few bytes that claim to be more."""
SECONDS_MAX = 2.0
"""Of the processor, for one input; most take less than a millisecond."""
MEMORY_BYTES_MAX = 256 * MIB
"""That an input may take, beyond what the child has before it: what makes up inputs takes more with each of them."""
HANG_SECONDS = 600.0
COUNT_MAX = 1000
"""Inputs for one child: what makes them up remembers all that it has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """What is fed, and with what."""

    inputs: st.SearchStrategy[bytes]
    parse: Callable[[bytes, Path], object]
    """Parses some bytes; it may use the folder, and asserts what has to be true of what it accepts."""
    right: tuple[type[LayerstoreError], ...]
    """The errors that it may end in."""
    seconds_max: float = SECONDS_MAX
    may_write: bool = False
    """Whether files of its own come and go."""


class TooSlow(Exception):  # no error of ours: the parser is at fault
    """An input took longer than it may."""


class Executed(Exception):  # no error of ours: the parser is at fault
    """An input made the parser run something."""


# -- changes -------------------------------------------------------------------------------------------------------

_LENGTHS = [0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
_OPENERS = [
    b"[", b"{", b'{"a":', b"(", b"]", b"}", b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\x85", b"- ", b"a: ",
]  # fmt: skip

Change = Callable[[bytes], bytes]


def _flip(place: int, bit: int) -> Change:
    def change(data: bytes) -> bytes:
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]

    return change


def _cut(place: int) -> Change:
    return lambda data: data[: place % (len(data) + 1)]


def _put(place: int, new: bytes, instead_of: int) -> Change:
    def change(data: bytes) -> bytes:
        at = place % (len(data) + 1)
        return data[:at] + new + data[at + instead_of :]

    return change


def _repeat(place: int, length: int, times: int) -> Change:
    def change(data: bytes) -> bytes:
        at = place % (len(data) + 1)
        part = data[at : at + length]
        return data[:at] + part * min(times, INPUT_BYTES_MAX // max(1, len(part))) + data[at:]

    return change


_places = st.integers(0, 1 << 20)
_numbers = st.builds(
    lambda value, width, order, less: max(0, value - less).to_bytes(8, order)[-width if order == "big" else 0 :][
        :width
    ],
    st.sampled_from(_LENGTHS),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["big", "little"]),
    st.integers(0, 2),
)
_changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(_flip, _places, st.integers(0, 7)),
    st.builds(_cut, _places),
    st.builds(_put, _places, st.just(b""), st.integers(1, 64)),
    st.builds(_put, _places, st.binary(min_size=1, max_size=8), st.integers(0, 8)),
    st.builds(lambda place, new: _put(place, new, len(new)), _places, _numbers),
    st.builds(_repeat, _places, st.integers(1, 64), st.integers(1, 1 << 17)),
    st.builds(
        lambda place, opener, times: _put(place, opener * times, 0),
        _places,
        st.sampled_from(_OPENERS),
        st.integers(1, 60_000),
    ),
)


def changed(samples: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return sound *samples* with a few changes: flips, cuts, lies about lengths, bombs, deep nests and splices."""

    def spliced(first: bytes, second: bytes, one: int, other: int) -> bytes:
        return first[: one % (len(first) + 1)] + second[other % (len(second) + 1) :]

    whole = st.sampled_from(samples)
    start = st.one_of(whole, whole, whole, st.builds(spliced, whole, whole, _places, _places))
    return st.builds(_all_changes, start, st.lists(_changes, min_size=1, max_size=3))


def _all_changes(data: bytes, changes: list[Change]) -> bytes:
    for change in changes:
        data = change(data or b"\0")[:INPUT_BYTES_MAX]
    return data


# -- changes of values ---------------------------------------------------------------------------------------------

_ODD: list[Any] = [
    None, True, False, 0, -1, 1, 255, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, float("nan"), float("inf"),
    "", "x", "..", "\0", "a/b", "é" * 100, "9" * 100, b"", b"\xff", b"x" * 100, [], {}, [[]], {"a": None},
]  # fmt: skip


def changed_values(samples: list[Any]) -> st.SearchStrategy[Any]:
    """Return plain values, sound but for a few nodes: replaced, removed, doubled, nested, or put for one another."""
    change = st.tuples(
        _places, st.sampled_from(["replace", "remove", "double", "nest", "other"]), st.sampled_from(_ODD), _places
    )
    return st.builds(_changed_value, st.sampled_from(samples), st.lists(change, min_size=1, max_size=3))


def _changed_value(value: Any, changes: list[tuple[int, str, Any, int]]) -> Any:
    for place, how, odd, other in changes:
        paths = list(_paths(value))
        path = paths[place % len(paths)]
        found = _at(value, path)
        new = {"replace": odd, "double": [found, found], "other": _at(value, paths[other % len(paths)])}.get(how, odd)
        if how == "nest":
            new = found
            for _ in range(other % 600):
                new = [new]
        value = _without(value, path) if how == "remove" and path else _replaced(value, path, new)
    return value


def _paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    if len(above) < 60:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            yield from _paths(value[key], (*above, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


def _without(value: Any, path: tuple[Any, ...]) -> Any:
    copy = value.copy()
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = _without(value[path[0]], path[1:])
    return copy


# -- running -------------------------------------------------------------------------------------------------------


def fed(module: str, name: str, *, count: int, folder: Path) -> tuple[int, int]:
    """
    Feed *count* inputs to the parser *name* of *module*, in children; return how many were accepted and refused.

    The seed is printed, and can be given as LAYERSTORE_FUZZ_SEED.
    """
    seed = int(os.environ.get("LAYERSTORE_FUZZ_SEED") or random.SystemRandom().randrange(10**9))
    print(f"{name}: LAYERSTORE_FUZZ_SEED={seed}")
    folder.mkdir(exist_ok=True)
    accepted = refused = 0
    for start in range(0, count, COUNT_MAX):
        args = (module, name, min(count - start, COUNT_MAX), seed + start, folder)
        outcome = in_child(feed, *args, timeout_seconds=HANG_SECONDS)
        assert outcome.exit_code == 0, f"{'it hangs' if outcome.exit_code is None else outcome}: {folder / 'input'}"
        outcomes = outcome.needed()
        accepted, refused = accepted + outcomes[True], refused + outcomes[False]
    print(f"{name}: {accepted} accepted, {refused} refused")
    return accepted, refused


def feed(module: str, name: str, count: int, seed: int, folder: Path) -> Counter[bool]:
    """Do that, in this process, which may be killed for it; count the inputs by whether they were accepted."""
    tempfile.tempdir = str(folder)
    parser: Parser = vars(importlib.import_module(module))["PARSERS"][name]()
    outcomes = Counter[bool]()
    guard = _Guard(parser)

    def judge(data: bytes) -> None:
        (folder / "input").write_bytes(data)
        with _address_space(bytes_more), guard.watching():
            outcomes[_parsed(parser, data, folder)] += 1

    def run(inputs: st.SearchStrategy[bytes], examples: int) -> None:
        test = settings(
            max_examples=examples, deadline=None, database=None, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck), print_blob=False,
        )(given(inputs)(judge))  # fmt: skip
        hypothesis.seed(seed)(test)()

    bytes_more = 1 << 40  # at first: what is imported at first use is no memory of the inputs
    run(parser.inputs, min(20, count))
    bytes_more = MEMORY_BYTES_MAX
    run(parser.inputs, count)
    return outcomes


def _parsed(parser: Parser, data: bytes, folder: Path) -> bool:
    try:
        parser.parse(data, folder)
    except parser.right as exc:
        words = str(exc)
    else:
        return True
    assert words, "an error without words"
    assert words.isprintable(), "an error that is not one line"
    return False


class _Guard:
    """Stops what takes too long, and notices what runs code."""

    # What a parser has no business with; none of them is part of reading a file.
    _FORBIDDEN = frozenset(
        {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec", "pickle.find_class",
         "socket.connect"}
    )  # fmt: skip
    _WRITES = frozenset({"os.remove", "os.rename", "os.mkdir", "shutil.rmtree"})

    def __init__(self, parser: Parser) -> None:
        self._seconds_max = parser.seconds_max
        self._forbidden = self._FORBIDDEN if parser.may_write else self._FORBIDDEN | self._WRITES
        self._is_watching = False
        for name in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-8-sig"):
            codecs.lookup(name)  # loaded at first use, which would look like running something
        codecs.lookup("unicode_escape")
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGPROF, self._stop)

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._is_watching = True
        signal.setitimer(signal.ITIMER_PROF, self._seconds_max)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self._is_watching = False

    def _stop(self, number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"an input takes longer than {self._seconds_max} s")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_watching and event in self._forbidden:
            raise Executed(f"{event} {arguments!r}")


@contextmanager
def _address_space(more_bytes: int) -> Iterator[None]:
    """Let this process have so much more memory and no more; what asks for more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
