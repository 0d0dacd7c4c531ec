"""
Matrices: of a test with many cases the usual run takes one at random, and the full one the others.

``sample(n)`` is for matrices that are too large for both: they take n cases, and the exhaustive run takes all. A test
that is marked ``every_case`` has none left out.

What no other test looks at is named, by the cases' ids, and always taken besides: ``sample(n, always=("init",))``.
Where tests of a file share what takes long, they share the sample: ``sample(n, by="scenario")`` takes n values of that
parameter, the same ones for all of them. A test with two marks has the cases that both take.
The seed is pytest-randomly's, printed above the first test: ``-p randomly --randomly-seed=N`` takes the same cases
again. Who names a case, by its id, has it whatever the seed.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import chain

import pytest

USUAL = 1
"""The usual run takes so many cases of a test."""

Cases = dict[str, list[pytest.Item]]
"""By the name that a mark knows a case by."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is left out, before pytest deselects by marks."""
    wanted = config.getoption("markexpr")
    is_full = "exhaustive" in wanted and "not exhaustive" not in wanted
    seed = config.getoption("randomly_seed", default=0)
    named = {argument.partition("::")[2] for argument in config.args}
    asked = [item for item in items if item.nodeid.partition("::")[2] not in named]
    for sampled, (mark, cases) in _sampled(asked).items():
        left = set(cases) if is_full else _left_out(mark, cases, f"{sampled}/{seed}")
        for item in chain.from_iterable(cases[name] for name in left):
            item.add_marker(pytest.mark.exhaustive)
    for test, many in _matrices(asked).items():
        for name in _all_but(many, USUAL, f"{test}/{seed}"):
            for item in many[name]:
                item.add_marker(pytest.mark.full)


def _matrices(items: list[pytest.Item]) -> dict[str, Cases]:
    """Return the cases of each test without a mark that says how many are taken."""
    found: dict[str, Cases] = defaultdict(lambda: defaultdict(list))
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if case and not any(item.get_closest_marker(name) for name in ("sample", "every_case", "full", "exhaustive")):
            found[test][case].append(item)
    return found


def _sampled(items: list[pytest.Item]) -> dict[str, tuple[pytest.Mark, Cases]]:
    """Return what samples are taken of, by its name, and the mark that says how."""
    found: dict[str, tuple[pytest.Mark, Cases]] = {}
    for item in items:
        for mark, sampled, case in _marked(item):
            _, cases = found.setdefault(sampled, (mark, defaultdict(list)))
            cases[case].append(item)
    return found


def _marked(item: pytest.Item) -> Iterator[tuple[pytest.Mark, str, str]]:
    for mark in item.iter_markers("sample"):
        if parameter := mark.kwargs.get("by"):
            assert isinstance(item, pytest.Function)
            value = item.callspec.params[parameter]
            yield mark, f"{item.path.name}/{parameter}", str(getattr(value, "name", value))
        else:
            test, _, case = item.nodeid.partition("[")
            yield mark, test, case.removesuffix("]")


def _left_out(mark: pytest.Mark, cases: Collection[str], seed: str) -> set[str]:
    [size] = mark.args
    return _all_but(set(cases) - set(mark.kwargs.get("always", ())), size, seed)


def _all_but(cases: Collection[str], size: int, seed: str) -> set[str]:
    """Return all but *size* of the *cases*."""
    others = sorted(cases)
    return set(others) - set(random.Random(seed).sample(others, min(size, len(others))))
