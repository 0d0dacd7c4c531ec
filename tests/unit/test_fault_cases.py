"""Marks say which case a test shows: they are found wherever tests are, and every case has one."""

from pathlib import Path

import pytest

from tests.fault_cases import PAGES, MarkedTest, Page, printed

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.mark)
def test_every_case_has_a_test(page: Page) -> None:
    """Whoever adds a case, removes the last test of one, or names one that there is not, is told."""
    numbers = page.numbers()

    assert len(numbers) == len(set(numbers)) > 10
    assert set(numbers) == {number for test in page.tests() for number in test.shows}


def test_the_tests_of_a_case_are_printed() -> None:
    """By the names under which pytest runs them."""
    lines = list(printed(PAGES, "7", "llmtailor 7"))

    assert "  tests/storage/test_locks.py::test_a_killed_holder_leaves_no_lock" in lines
    assert "  tests/compose/test_llmtailor_faults.py::test_composing_changes_no_source" in lines
    assert [line for line in lines if not line.startswith(" ")] == ["faults 7", "known-faults 7"]
