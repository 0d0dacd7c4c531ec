"""Marks say which fault a test shows: they are found wherever tests are, and every fault has one."""

from pathlib import Path

import pytest

from tests import fault_cases, known_faults
from tests.marks import MarkedTest, Marker, cell

NUMBERED = Marker(mark="fault", kind=int)
NAMED = Marker(mark="known_fault", kind=str)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("pytestmark = pytest.mark.fault(1)\n", r"test_x\.py:1: fault is no decorator of a test"),
        ("@pytest.mark.fault\ndef test_x(): ...\n", r"test_x\.py:1: fault is no decorator of a test"),
        ("@pytest.mark.fault(1)\ndef helper(): ...\n", r"test_x\.py:1: fault is no decorator of a test"),
        ("@pytest.mark.fault('1')\ndef test_x(): ...\n", r"test_x\.py:1: fault names what it shows by a plain int"),
        ("@pytest.mark.fault(True)\ndef test_x(): ...\n", r"test_x\.py:1: fault names what it shows by a plain int"),
        ("@pytest.mark.fault(1 + 1)\ndef test_x(): ...\n", r"test_x\.py:1: fault names what it shows by a plain int"),
    ],
)
def test_a_mark_that_no_page_would_show_is_refused(tmp_path: Path, source: str, match: str) -> None:
    """Pages read marks from the source: one in another place, or another form, is told with its line."""
    (tmp_path / "test_x.py").write_text(source)

    with pytest.raises(ValueError, match=match):
        NUMBERED.tests(tmp_path)


def test_names_are_no_numbers(tmp_path: Path) -> None:
    """Each mark has its own kind of name."""
    (tmp_path / "test_x.py").write_text("@pytest.mark.known_fault(7)\ndef test_x(): ...\n")

    with pytest.raises(ValueError, match=r"test_x\.py:1: known_fault names what it shows by a plain str"):
        NAMED.tests(tmp_path)


def test_marks_are_found_wherever_tests_are(tmp_path: Path) -> None:
    """In classes and beside other decorators, several to a test; another mark's are another's."""
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "test_x.py").write_text(
        "class TestX:\n"
        "    @other\n"
        "    @pytest.mark.known_fault('x 1', 'y 2')\n"
        "    @pytest.mark.fault(3, 4)\n"
        "    @pytest.mark.fault(5)\n"
        "    def test_x(self): ...\n"
    )

    (numbered,) = NUMBERED.tests(tmp_path / "tests")
    (named,) = NAMED.tests(tmp_path / "tests")

    assert numbered == MarkedTest("tests/deep/test_x.py", 6, "test_x", (3, 4, 5))
    assert named.shows == ("x 1", "y 2")


def test_a_cell_gathers_tests_by_file() -> None:
    """Each file is named once."""
    tests = [MarkedTest("tests/a.py", 1, "test_x", (1,)), MarkedTest("tests/a.py", 9, "test_y", (1,))]

    assert cell(tests) == "`a.py`: `test_x`, `test_y`"


def test_every_case_and_every_known_fault_has_a_test_and_the_pages_say_which() -> None:
    """Whoever adds a fault, removes the last test of one, or names one that there is not, is told."""
    cases, faults = fault_cases.MARKER.tests(), known_faults.MARKER.tests()
    by_case, by_fault = fault_cases.cases_with_tests(cases), known_faults.faults_with_tests(faults)

    assert [number for number, tests in by_case.items() if not tests] == []
    assert [fault for fault, tests in by_fault.items() if not tests] == []
    assert list(by_case) == list(fault_cases.CASES) == list(range(1, len(fault_cases.CASES) + 1))
    assert list(by_fault) == known_faults.REFERENCES
    assert fault_cases.PAGE.read_text() == fault_cases.page(cases), "python -m tests.fault_cases writes it"
    assert known_faults.PAGE.read_text() == known_faults.page(faults), "python -m tests.known_faults writes it"
