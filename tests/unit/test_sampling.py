"""What a run takes of a matrix: by the seed, as the mark says, and all where all is asked for."""

import json
import subprocess
import sys
from pathlib import Path

from tests.environment import REPOSITORY

MATRIX = """
import pytest

@pytest.mark.parametrize("number", range(20))
@pytest.mark.sample(3, always=("7", "11"))
def test_number(number):
    pass

@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("digit", "1234567")
@pytest.mark.sample(2, by="digit", always=("7",))
@pytest.mark.sample(1, by="letter")
def test_both(digit, letter):
    pass

@pytest.mark.parametrize("digit", "12345678")
@pytest.mark.sample(2, by="digit", always=("7",))
def test_digit(digit):
    pass

@pytest.mark.parametrize("colour", "rgbcmyk")
def test_colour(colour): pass

@pytest.mark.parametrize("colour", "rgbcmyk")
@pytest.mark.every_case
def test_each_colour(colour): pass

@pytest.mark.exhaustive
def test_all(): pass

def test_one(): pass
"""


PROGRAM = """
import json, os, sys
import pytest

class Names:
    def pytest_addoption(self, parser):  # as pytest-randomly has it, which is seconds to start
        parser.addoption("--randomly-seed", type=int, default=0)

    def pytest_collection_finish(self, session):
        self.found = [item.name for item in session.items]

def collected(options):
    names = Names()
    pytest.main(["--collect-only", "-q", "-p", "tests.sampling", "-c", os.devnull, *options], plugins=[names])
    return names.found

print("\\n" + json.dumps([collected(options) for options in json.loads(sys.argv[1])]))
"""

USUAL = ["-m", "not exhaustive", "test_matrix.py"]


def collected(folder: Path, *runs: list[str]) -> list[set[str]]:
    """Return what runs with these options would take, all asked of one process."""
    (folder / "test_matrix.py").write_text(MATRIX)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(runs)],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [set(names) for names in json.loads(done.stdout.splitlines()[-1])]


def test_a_sample_is_as_large_as_it_says_and_its_seed_decides(tmp_path: Path) -> None:
    """Three at random, two in any case; what is not a matrix is not touched. Other seeds look at others."""
    runs = [[*USUAL, f"--randomly-seed={seed}"] for seed in (1, 1, 2)]
    first, again, other = collected(tmp_path, *runs)

    assert {"test_one", "test_number[7]", "test_number[11]"} <= first
    assert len([name for name in first if "number" in name]) == 5
    assert "test_all" not in first
    assert first == again
    assert first != other


def test_tests_of_a_file_share_what_they_sample_a_parameter_of(tmp_path: Path) -> None:
    """The same digits for both, where both have them; and with each the one letter."""
    for found in collected(tmp_path, *([*USUAL, f"--randomly-seed={seed}"] for seed in range(4))):
        digits = {name[-2] for name in found if "digit" in name}
        both = {(name[-4], name[-2]) for name in found if "both" in name}

        assert len(digits) == 3
        assert "7" in digits
        assert {digit for digit, _ in both} == digits - {"8"}
        assert len({letter for _, letter in both}) == 1


def test_one_case_is_usual_and_the_full_run_has_the_others(tmp_path: Path) -> None:
    """Given one seed, each case is in one of the two runs."""
    usual, full = collected(
        tmp_path, ["-m", "not full and not exhaustive", "test_matrix.py"], ["-m", "full", "test_matrix.py"]
    )

    assert len([name for name in usual if name.startswith("test_colour")]) == 1
    assert len([name for name in usual if name.startswith("test_each_colour")]) == 7
    assert len(full) == 6
    assert all(name.startswith("test_colour") for name in full)


def test_the_exhaustive_run_has_all_of_a_sample(tmp_path: Path) -> None:
    """However it is asked for; and who names a case has that one."""
    several = [f"test_matrix.py::test_number[{number}]" for number in range(5)]
    full, narrow, every, one, five = collected(
        tmp_path,
        ["-m", "exhaustive", "test_matrix.py"],
        ["-m", "exhaustive and not slow", "test_matrix.py"],
        ["-m", "", "test_matrix.py"],
        ["-m", "not exhaustive", "test_matrix.py::test_number[5]"],
        ["-m", "not exhaustive", *several],
    )

    assert (len(full), len(narrow), len(every)) == (50, 50, 65)
    assert one == {"test_number[5]"}
    assert len(five) == 5
