"""Marks that name what a test shows are found wherever tests are, and one that nobody would find is refused."""

from pathlib import Path

import pytest

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
