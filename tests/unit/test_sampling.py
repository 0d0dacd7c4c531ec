"""The mark that samples a matrix leaves out what it says, by the seed, and nothing where all is asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import REPOSITORY

MATRIX = """
import pytest

@pytest.mark.parametrize("number", range(20))
@pytest.mark.sample(3, always=("7", "11"))
def test_number(number):
    pass

@pytest.mark.exhaustive
def test_all(): pass

def test_one(): pass
"""


@pytest.fixture
def collected(tmp_path: Path) -> "type[Collected]":
    """Return what collects the matrix."""
    (tmp_path / "test_matrix.py").write_text(MATRIX)
    return type("Here", (Collected,), {"folder": tmp_path})


class Collected:
    """What a run would take."""

    folder: Path

    def __init__(self, *options: str) -> None:
        """Ask pytest, in a process of its own."""
        words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.sampling", "-c", os.devnull]
        done = subprocess.run(
            [*words, f"--rootdir={self.folder}", *options],
            cwd=self.folder,
            env={"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        self.names = {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}
        assert self.names, done.stdout + done.stderr


USUAL = ("-m", "not exhaustive", "test_matrix.py")


def test_a_sample_is_as_large_as_it_says_and_has_what_it_must(collected: type[Collected]) -> None:
    """Three at random, two in any case; what is no matrix is not touched."""
    names = collected(*USUAL, "-p", "pytest_randomly", "--randomly-seed=1").names

    assert {"test_one", "test_number[7]", "test_number[11]"} <= names
    assert len(names) == 6
    assert "test_all" not in names


def test_the_seed_decides(collected: type[Collected]) -> None:
    """The same twice, others with another one: after many of them everything has been looked at."""
    by_seed = [collected(*USUAL, "-p", "pytest_randomly", f"--randomly-seed={seed}").names for seed in (1, 1, 2)]

    assert by_seed[0] == by_seed[1]
    assert len(set.union(*by_seed)) > 6


def test_the_full_run_has_all(collected: type[Collected]) -> None:
    """However it is asked for; and who names a case has that one."""
    assert len(collected("-m", "exhaustive", "test_matrix.py").names) == 21
    assert len(collected("-m", "exhaustive and not slow", "test_matrix.py").names) == 21
    assert len(collected("-m", "", "test_matrix.py").names) == 22
    assert collected("-m", "not exhaustive", "test_matrix.py::test_number[5]").names == {"test_number[5]"}
