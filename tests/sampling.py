"""
Large matrices: of a test that is marked ``sample(n)`` the usual run takes n cases at random, the full one all.

What no other test looks at is named, by the cases' ids, and always taken besides: ``sample(n, always=("init",))``.
The seed is pytest-randomly's, printed above the first test: ``-p randomly --randomly-seed=N`` takes the same cases
again. Who names a case, by its id, has it whatever the seed.
"""

import random

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as exhaustive what is left out, before pytest deselects by marks; in the full run, all of it."""
    wanted = config.getoption("markexpr")
    is_full = "exhaustive" in wanted and "not exhaustive" not in wanted
    seed = config.getoption("randomly_seed", default=0)
    tests: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = item
    for name, cases in tests.items():
        mark = next(iter(cases.values())).get_closest_marker("sample")
        assert mark is not None
        [size] = mark.args
        always = {f"{name}[{case}]" for case in mark.kwargs.get("always", ())} & cases.keys()
        others = sorted(cases.keys() - always)
        taken = random.Random(f"{name}/{seed}").sample(others, min(size, len(others)))
        for case in cases if is_full else set(others) - set(taken):
            cases[case].add_marker(pytest.mark.exhaustive)
