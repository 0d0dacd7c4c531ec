"""Every fault that is known from other tools has a test here, and the page of them is the generated one."""

from functools import cache

import pytest

from tests.known_faults import LISTS, MARKER, PAGE, faults_with_tests, page
from tests.marks import MarkedTest


@cache
def marked() -> list[MarkedTest[str]]:
    """Return all marked tests, once they are asked for: to look for them takes seconds."""
    return MARKER.tests()


@pytest.mark.parametrize("fault", [reference for of in LISTS for reference in of.references])
def test_every_known_fault_has_a_test(fault: str) -> None:
    """Whoever adds a fault to a list, or removes the last test of one, is told."""
    assert faults_with_tests(marked())[fault], f"no test is marked with known_fault({fault!r})"


def test_no_test_names_a_fault_that_is_on_no_list() -> None:
    """A slip of the pen would otherwise mark nothing."""
    known = {reference for of in LISTS for reference in of.references}

    assert [(test.name, fault) for test in marked() for fault in test.shows if fault not in known] == []


def test_the_page_is_the_generated_one() -> None:
    """What the page says is what the marks say: python -m tests.known_faults writes it anew."""
    assert PAGE.read_text() == page(marked())
