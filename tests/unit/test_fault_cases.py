"""Every case has a test, or a reason why it cannot have one, and the page of them is the generated one."""

from functools import cache

from tests.fault_cases import CASES, GROUPS, MARKER, OPEN, PAGE, REASONS, cases_with_tests, page
from tests.marks import MarkedTest


@cache
def marked() -> list[MarkedTest[int]]:
    """Return all marked tests, once they are asked for: to look for them takes seconds."""
    return MARKER.tests()


def test_every_case_has_a_test_or_a_reason() -> None:
    """Whoever adds a case, or removes the last test of one, is told; so is who has shown a case that was open."""
    without = {number for number, tests in cases_with_tests(marked()).items() if not tests}

    assert without == {*REASONS, *OPEN}
    assert not REASONS.keys() & set(OPEN)


def test_no_test_names_a_case_that_there_is_not() -> None:
    """A slip of the pen would otherwise mark nothing."""
    assert [(test.name, number) for test in marked() for number in test.shows if number not in CASES] == []


def test_cases_are_numbered_without_a_gap() -> None:
    """Numbers are how people speak of them: each is given once, in order."""
    assert [number for group in GROUPS for number in group.cases] == list(range(1, len(CASES) + 1))


def test_the_page_is_the_generated_one() -> None:
    """What the page says is what the marks say: python -m tests.fault_cases writes it anew."""
    assert PAGE.read_text() == page(marked())
