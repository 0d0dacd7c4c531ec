"""Marks say which case a test shows: they are found wherever tests are, and every case has one."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault_cases import PAGES, MarkedTest, Page, cell

NUMBERED, NAMED = PAGES


@pytest.mark.parametrize(
    ("page", "source", "match"),
    [
        (NUMBERED, "pytestmark = pytest.mark.fault(1)\n", "fault is not a decorator of a test"),
        (NUMBERED, "@pytest.mark.fault\ndef test_x(): ...\n", "fault is not a decorator of a test"),
        (NUMBERED, "@pytest.mark.fault(1)\ndef helper(): ...\n", "fault is not a decorator of a test"),
        (NUMBERED, "@pytest.mark.fault('1')\ndef test_x(): ...\n", "fault names a case as in"),
        (NUMBERED, "@pytest.mark.fault(True)\ndef test_x(): ...\n", "fault names a case as in"),
        (NAMED, "@pytest.mark.known_fault(7)\ndef test_x(): ...\n", "known_fault names a case as in"),
        (NAMED, "@pytest.mark.known_fault('x 7')\ndef test_x(): ...\n", "known_fault names a case as in"),
    ],
)
def test_a_mark_that_no_page_would_show_is_refused(tmp_path: Path, page: Page, source: str, match: str) -> None:
    """Pages read marks from the source: one in another place, or another form, is told with its line."""
    (tmp_path / "test_x.py").write_text(source)

    with pytest.raises(ValueError, match=rf"test_x\.py:1: {match}"):
        page.tests(tmp_path)


def test_marks_are_found_wherever_tests_are(tmp_path: Path) -> None:
    """In classes and beside other decorators, several to a test; another mark's are another's."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "test_x.py").write_text(
        "class TestX:\n"
        "    @other\n"
        "    @pytest.mark.known_fault('llmtailor 1', 'llmtailor 2')\n"
        "    @pytest.mark.fault(3, 4)\n"
        "    @pytest.mark.fault(5)\n"
        "    def test_x(self): ...\n"
    )

    (numbered,) = NUMBERED.tests(tmp_path)
    (named,) = NAMED.tests(tmp_path)

    assert numbered == MarkedTest("deep/test_x.py", 6, "test_x", (3, 4, 5))
    assert named.shows == (1, 2)
    assert cell([numbered, replace(numbered, name="test_y")]) == "`deep/test_x.py`: `test_x`, `test_y`"
    with pytest.raises(ValueError, match=r"faults\.md has no case \[999\]"):
        NUMBERED.written([replace(numbered, shows=(1, 999))])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.mark)
def test_every_case_has_a_test_and_the_page_says_which(page: Page) -> None:
    """Whoever adds a case, removes the last test of one, or names one that there is not, is told."""
    tests = page.tests()
    numbers = page.numbers()

    assert len(numbers) == len(set(numbers))
    assert set(numbers) == {number for test in tests for number in test.shows}
    assert page.path.read_text() == page.written(tests), "python -m tests.fault_cases writes it"
